"""The trackers of a training."""

import struct
import sys
from types import SimpleNamespace

from mlmoe_jax.config import default_config
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.trackers import EventFiles, open_trackers


def events(folder) -> list:
    """Return the records of all event files, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:  # length u64, checksum u32, the record, checksum u32
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def scalars(folder) -> list[tuple[str, int, float]]:
    return [(value.tag, event.step, value.simple_value) for event in events(folder) for value in event.summary.value]


def test_rows_become_scalars_and_a_resumed_run_discards_the_rows_that_it_repeats(tmp_path):
    folder = RunFolder(tmp_path)
    first = EventFiles(folder, first_step=0)
    first.write({"step": 2, "loss": 0.5, "val/raw/mAP": 0.25})
    assert scalars(tmp_path / "tensorboard") == [("loss", 2, 0.5), ("val/raw/mAP", 2, 0.25)], "live, before the end"
    first.write({"step": 4, "loss": 0.125})
    first.close()
    second = EventFiles(folder, first_step=2)
    second.write({"step": 4, "loss": 0.0625})
    second.close()
    assert scalars(tmp_path / "tensorboard")[2:] == [("loss", 4, 0.125), ("loss", 4, 0.0625)]
    marks = [event.step for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert marks == [3], "TensorBoard discards earlier events from step 3 on"


def test_weights_and_biases_resumes_its_run(tmp_path, monkeypatch):
    started, logged = [], []
    run = SimpleNamespace(
        id="abc123", log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("end")
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: started.append(given) or run))
    config = default_config()
    config.log.tensorboard, config.log.wandb = False, "images"
    for _ in range(2):
        (tracker,) = open_trackers(RunFolder(tmp_path / "a"), config, 0)
        tracker.write({"step": 3, "loss": 0.5})
        tracker.close()
    assert [(given["id"], given["project"], given["name"]) for given in started] == [
        (None, "images", "a"),
        ("abc123", "images", "a"),
    ]
    assert started[0]["config"]["seed"] == 0
    assert logged == [(3, {"loss": 0.5}), "end"] * 2


def test_the_config_names_the_trackers(tmp_path):
    config = default_config()
    config.log.tensorboard = False
    assert open_trackers(RunFolder(tmp_path), config, 0) == []
    (tracker,) = open_trackers(RunFolder(tmp_path), default_config(), 7)
    assert isinstance(tracker, EventFiles)
    tracker.close()
