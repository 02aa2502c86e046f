"""A real Label Studio server: it imports our tasks, exports labels that we read, and its ML backend is our server.

It runs with --all, if the program `label-studio` is installed or $LABEL_STUDIO names it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from etils import epath
from helpers.color_model import NAMES, color, expected
from helpers.devices import environment_of
from helpers.drawn_images import encoded
from helpers.ports import free_port
from helpers.tables import data_settings

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.labeling_formats import FORMATS, LabelEntry, LabelFile
from mlmoe_jax.data.sources.open import open_split

TOKEN = "0123456789abcdef0123456789abcdef01234567"
SETTINGS = {"SENTRY_DSN": "", "LATEST_VERSION_CHECK": "false", "COLLECT_ANALYTICS": "false"}
SETTINGS |= {
    "ML_BLOCK_LOCAL_IP": "false",
    "SSRF_PROTECTION_ENABLED": "false",
    "LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED": "true",
}
OURS = """
import sys
from helpers.color_server import make_labeler
from mlmoe_jax.apps.serving import server
from mlmoe_jax.inference.predictor import Predictor

Predictor.from_run = lambda *predictions, **options: make_labeler().predictor
server.Labeler = lambda predictor: make_labeler(label_studio=sys.argv[2])
from mlmoe_jax.main import main
sys.exit(main(["--mode=serve", "--workdir=" + sys.argv[1], "--port=" + sys.argv[3]]))
"""


@pytest.fixture
def start():
    """A function that starts a program and waits until its address answers."""
    started = []

    def run(command, address, seconds, **variables):
        process = subprocess.Popen(command, env=environment_of(**variables), stdout=sys.stderr)
        started.append(process)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert process.poll() is None, f"{command[0]} has ended"
            try:
                with urllib.request.urlopen(address, timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        raise AssertionError(f"{address} does not answer")

    yield run
    for process in started:
        process.terminate()
        process.wait(30)


@pytest.fixture
def server(tmp_path, start):
    """A function that calls the API of a new Label Studio server, and its address."""
    program = os.environ.get("LABEL_STUDIO") or shutil.which("label-studio")
    if not program:
        pytest.skip("the program label-studio is not installed, and LABEL_STUDIO does not name it")
    port = free_port()
    address, account = (
        f"http://127.0.0.1:{port}",
        ["--username=a@example.org", "--password=words", f"--user-token={TOKEN}"],
    )
    place = ["--no-browser", "--internal-host=127.0.0.1", f"--port={port}", f"--data-dir={tmp_path / 'data'}"]
    folders = {"LABEL_STUDIO_BASE_DATA_DIR": str(tmp_path / "data")}
    variables = SETTINGS | folders | {"LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT": str(tmp_path)}
    start([program, "start", *place, *account, "--enable-legacy-api-token"], f"{address}/health", 300, **variables)

    def call(path, content=None):
        body = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"Token {TOKEN}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", body, headers), timeout=120) as answer:
            return json.loads(answer.read())

    return call, address


COLORS = {"photos/red one.png": color(200), "photos/green.png": color(0, 200), "photos/none.png": color(0)}


@pytest.mark.slow
def test_label_studio_takes_our_tasks_exports_labels_that_we_read_and_asks_our_server(tmp_path, server, start):
    call, address = server
    (tmp_path / "photos").mkdir()
    for name, image in COLORS.items():
        (tmp_path / name).write_bytes(encoded(image))
    entries = [LabelEntry(name, {"blue": POSITIVE, "dark": POSITIVE}, dict.fromkeys(NAMES, 0.75)) for name in COLORS]
    file = LabelFile(epath.Path(tmp_path / "tasks.json"), NAMES, list(COLORS), str(tmp_path), "a version")
    FORMATS["label_studio"].write(file, entries)
    ours = json.loads((tmp_path / "tasks.json").read_text())

    project = call("/api/projects", {"title": "photos", "label_config": (tmp_path / "tasks_config.xml").read_text()})[
        "id"
    ]
    call("/api/storages/localfiles", {"project": project, "path": str(tmp_path / "photos"), "use_blob_urls": True})
    call(f"/api/projects/{project}/import", ours)
    tasks = call(f"/api/tasks?project={project}&fields=all&page_size=100")["tasks"]
    tasks = {task["data"]["image"]: task for task in tasks}
    for task in ours:
        (theirs,) = tasks[task["data"]["image"]]["predictions"]
        assert {key: theirs[key] for key in ("model_version", "score")} == {"model_version": "a version", "score": 0.75}
        regions = [{key: region[key] for key in task["predictions"][0]["result"][0]} for region in theirs["result"]]
        assert regions == task["predictions"][0]["result"]

    ids = {name: tasks[task["data"]["image"]]["id"] for name, task in zip(COLORS, ours, strict=True)}
    both = [ours[0]["predictions"][0]["result"][0] | {"value": {"choices": ["red", "dark"]}}]
    one = [both[0] | {"value": {"choices": ["green"]}}]
    call(f"/api/tasks/{ids['photos/red one.png']}/annotations", {"result": both})
    call(f"/api/tasks/{ids['photos/green.png']}/annotations", {"result": one})
    call(f"/api/tasks/{ids['photos/none.png']}/annotations", {"result": [], "was_cancelled": True})
    for kind in ("JSON", "JSON_MIN"):
        export = call(f"/api/projects/{project}/export?exportType={kind}&download_all_tasks=true")
        (tmp_path / "export.json").write_text(json.dumps(export))
        split = open_split(
            data_settings("label_studio", tmp_path, table="export.json", classes="tasks_config.xml"), "train"
        )
        labels = dict(zip(split.ids, split.labels[:].tolist(), strict=True))
        assert labels == {"photos/red one.png": [1, 0, 0, 1], "photos/green.png": [0, 1, 0, 0]}

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    port = free_port()
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "LABEL_STUDIO_API_KEY": TOKEN}
    command = [sys.executable, "-c", OURS, str(tmp_path / "run"), address, str(port)]
    start(command, f"http://127.0.0.1:{port}/health", 120, **variables)
    backend = call("/api/ml", {"url": f"http://127.0.0.1:{port}/label_studio", "project": project, "title": "mlmoe"})
    assert (backend["state"], backend["model_version"]) == ("CO", "mlmoe")
    call(f"/api/dm/actions?id=retrieve_tasks_predictions&project={project}", {"selectedItems": {"all": True}})
    for name, image in COLORS.items():
        predictions = call(f"/api/tasks/{ids[name]}")["predictions"]
        (mine,) = [prediction for prediction in predictions if prediction["model_version"] == "mlmoe"]
        probabilities = dict(zip(NAMES, expected(*image[0, 0].tolist()), strict=True))
        labels = [label for label in NAMES if probabilities[label] >= 0.5]
        assert mine["result"][0]["value"]["choices"] == labels
        assert mine["score"] == pytest.approx(min(probabilities[label] for label in labels), abs=1e-5)
