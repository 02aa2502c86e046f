"""A server of images of one color, with low limits and a folder of images."""

import pytest
from helpers.color_model import color
from helpers.color_server import client_of, make_labeler
from helpers.commands import assert_sentence
from helpers.drawn_images import encoded
from helpers.paths import REPOSITORY

from mlmoe_jax.apps.serving.middleware import HEADERS
from mlmoe_jax.apps.serving.request_images import RequestLimits
from mlmoe_jax.apps.serving.server import own_names
from mlmoe_jax.apps.serving.service import Service

LIMITS = RequestLimits(images=4, megabytes=1, megapixels=1)


@pytest.fixture(scope="session")
def labeler(tmp_path_factory):
    """The compiled model, and `a.png` in the folder of images, beside which is `secret.png`."""
    folder = tmp_path_factory.mktemp("served") / "images"
    folder.mkdir()
    for path in (folder / "a.png", folder.parent / "secret.png"):
        path.write_bytes(encoded(color(200)))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    made = make_labeler(folder=str(folder))
    made.compile()
    return made


@pytest.fixture(scope="session")
def ask(labeler, tmp_path_factory):
    """A function that sends a request, and returns the JSON of the response, or a response that is not JSON.

    It checks the status and the headers, that an error is one sentence, and that no path of this machine is in it.
    """
    service = Service(labeler, LIMITS)
    secret = ("Traceback", ".py", str(REPOSITORY), str(tmp_path_factory.getbasetemp()))
    with client_of(service, hosts=own_names("127.0.0.1")) as send:

        def call(status: int, url: str = "/predict", method: str = "POST", **request):
            [answer] = send({"url": url, "method": method, **request})
            assert answer.status_code == status, answer.text
            assert answer.headers.items() >= {name.lower(): value for name, value in HEADERS.items()}.items()
            assert "access-control-allow-origin" not in answer.headers
            assert service.active == 0
            if answer.headers["content-type"] != "application/json":
                return answer
            assert not [part for part in secret if part in answer.text]
            if status != 200:
                assert list(answer.json()) == ["error"]
                assert_sentence(answer.json()["error"])
            return answer.json()

        yield call
