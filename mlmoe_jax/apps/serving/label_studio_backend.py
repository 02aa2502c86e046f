"""The ML backend of Label Studio. The Label Studio server requests predictions at /label_studio (docs/labels.md).

Everyone who can reach this server can send addresses of images. Therefore, images are only read from three places: the
request itself (data:image/…), the folder `serve.folder`, and the Label Studio server `serve.label_studio`. Redirects of
that server to another server are refused. The host and the token that Label Studio sends are not used.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

from etils import epath
from fastapi import FastAPI, HTTPException, Request

from mlmoe_jax.apps.serving.request_images import read_body
from mlmoe_jax.apps.serving.service import RequestOptions, Result, Service, require_result
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.sources.label_studio_export import LOCAL_FILES, Control, prediction, read_address, read_controls
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runtime.files import MIB, open_regular, read_stream
from mlmoe_jax.runtime.http import read_url
from mlmoe_jax.runtime.storage import Folder

TOKEN = "LABEL_STUDIO_API_KEY"  # environment variable
FETCH_SECONDS = 10.0  # time limit to fetch one image
MOST_TASKS = 1000  # in a request
_MOST_CONFIG = 4 << 20  # bytes of a labeling configuration
_MOST_TAGS = 200_000  # tags and attributes of a labeling configuration
_MOST_VALUES = 300_000  # names, texts and objects of a request, and as many lists


def add_label_studio_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of an ML backend of Label Studio below /label_studio. Raises UserError as `TaskImages` does."""
    predictor = service.labeler.predictor
    settings, version = predictor.run.config.serve, predictor.version
    task_images = TaskImages(settings.folder, settings.label_studio, service.limits.megabytes << 20)

    @app.get("/label_studio/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        """Return the status 200, also while the model is compiled: Label Studio waits only one second for it."""
        return {"status": "UP", "model_class": version}

    @app.post("/label_studio/setup", include_in_schema=False)
    async def setup() -> dict[str, str]:
        """Return the name of the model."""
        return {"model_version": version}

    @app.post("/label_studio/predict", include_in_schema=False)
    async def predict(request: Request) -> dict[str, Any]:
        """Return a list of predictions for each task. It has one prediction, or none if the image cannot be read."""
        async with service.admit() as arrived:
            body = await read_body(request, service.limits)
            arrived(1)
            tasks, name, controls = await asyncio.to_thread(_parse_request, body, predictor.names)
            addresses = [task.get(controls[name].image_key) for task in tasks]
            results = await _label(service, task_images, addresses, arrived)
        require_result(results)
        return {"model_version": version, "results": _predictions(results, predictor, name, controls)}


async def _label(
    service: Service, task_images: TaskImages, addresses: Sequence[Any], arrived: Callable[[int], None]
) -> list[Result]:
    """Return the results of images, of which at most `RequestLimits.images` are read and labeled at a time.

    `arrived` is the function from `Service.admit`. It is called with the number of images of each part.
    """
    results: list[Result] = []
    most = service.limits.images
    for start in range(0, len(addresses), most):
        part = addresses[start : start + most]
        arrived(len(part))
        results += await service.results(await task_images.read_all(part), RequestOptions())
    return results


def _predictions(
    results: Sequence[Result], predictor: Predictor, name: str, controls: Mapping[str, Control]
) -> list[list[dict[str, Any]]]:
    """Return a list of predictions for each result. Only choices are sent: Label Studio refuses other labels.

    `name` is the control of the labels; attributes have controls of their own.
    """
    control, values = controls[name], {}
    for label, (attribute, value) in predictor.tree.values(predictor.names).items():
        if attribute in controls and value in controls[attribute].values:
            values[label] = attribute, value
    choices = frozenset((*(control.values or predictor.names), *values))
    tags = {"control": name, "image": control.image, "values": values}
    predictions: list[list[dict[str, Any]]] = []
    for result in results:
        labels = [label for label in result.get("labels", ()) if label in choices]
        found = [] if "error" in result else [prediction(labels, result["scores"], predictor.version, **tags)]
        predictions.append(found)
    return predictions


def _parse_request(body: bytes, labels: Sequence[str]) -> tuple[list[dict[str, Any]], str, dict[str, Control]]:
    """Parse the body of a request for predictions, for a model with the given names of labels.

    Returns the data of each task, the name of the Choices control of the labeling config that contains the largest
    number of `labels`, and all controls by name.

    Raises:
      HTTPException: the request is malformed, has no tasks or more than a limit allows, or has no Choices control for
        an image.
    """
    # Counting takes milliseconds. Parsing would hold the interpreter for seconds, and every other request with it.
    # Numbers do not count, because they are parsed quickly.
    if max(body.count(b'"') // 2 + body.count(b"{"), body.count(b"[")) > _MOST_VALUES:
        raise HTTPException(413, f"the JSON has more than {_MOST_VALUES:,} names, texts and objects, or lists")
    try:
        content = json.loads(body)
        tasks, config = [{**task["data"]} for task in content["tasks"]], content["label_config"].encode()
        tags = config.count(b"<") + config.count(b"=")  # also the attributes
        small = len(tasks) <= MOST_TASKS and len(config) <= _MOST_CONFIG and tags <= _MOST_TAGS
        controls = read_controls(config) if small else {}
    except Exception as error:  # parsers raise errors of many types for content of another form
        expected = "the body should be JSON with tasks and a label_config, as Label Studio sends"
        raise HTTPException(400, expected) from error
    if not small:
        limits = f"{MOST_TASKS:,} tasks and a label_config of {_MOST_CONFIG:,} bytes and {_MOST_TAGS:,} tags"
        raise HTTPException(413, f"a request may have {limits} and attributes; ask for fewer tasks at a time")
    if not tasks or not controls:
        raise HTTPException(422, "there are no tasks" if controls else "the label_config has no Choices for an Image")
    name = max(controls, key=lambda name: len(set(labels).intersection(controls[name].values)))
    return tasks, name, controls


class TaskImages:
    """A reader of the images that tasks of Label Studio refer to.

    Args:
      folder: folder of the images with addresses below /data/local-files; "" = none. If `server` is "", images with
        other addresses are also read from this folder.
      server: address of the Label Studio server; "" = none.
      most_bytes: the largest size of an image file in bytes.

    Raises:
      UserError: the folder does not exist, or `server` does not begin with http:// or https://.
    """

    def __init__(self, folder: str, server: str, most_bytes: int):
        if folder and not os.path.isdir(os.path.expanduser(folder)):
            raise UserError(f"serve.folder={folder} is not a folder; set it to the folder of the images")
        if server and not server.startswith(("http://", "https://")):
            raise UserError(f"serve.label_studio={server} should begin with http:// or https://")
        self._folder = Folder(os.path.expanduser(folder)) if folder else None
        self._server, self.most_bytes = server.rstrip("/"), most_bytes
        self._fetch = partial(read_url, server=self._server, timeout=FETCH_SECONDS, most_seconds=FETCH_SECONDS)

    async def read_all(self, addresses: Sequence[Any]) -> list[tuple[str, bytes | BadImage]]:
        """Return (name, content of the file) for each address. For an unreadable image, the content is a BadImage."""
        return await asyncio.gather(*(asyncio.to_thread(self._read, address) for address in addresses))

    def _read(self, address: Any) -> tuple[str, bytes | BadImage]:
        name = str(address)[:100]
        try:
            return name, self.read(address)
        except (UserError, OSError, ValueError) as error:
            return name, BadImage(f"cannot read {name} as an image: {reason_of(error)}")

    def read(self, address: Any) -> bytes:
        """Return the content of the image file at an address of a task.

        Raises UserError, OSError or ValueError if the address is not allowed or cannot be read.
        """
        if not isinstance(address, str):
            raise UserError("the task has no address of an image")
        if address.startswith("data:"):
            return base64.b64decode(address.partition("base64,")[2], validate=True)
        if self._folder and (not self._server or urlsplit(address).path.rstrip("/") == LOCAL_FILES):
            with open_regular(self._inside(read_address(address))) as file:
                return read_stream(file, self.most_bytes)
        if not self._server:
            raise UserError("set serve.folder to the folder of the images, or serve.label_studio to the server")
        return self._fetch(urljoin(f"{self._server}/", address), self.most_bytes, headers=self._authorization())

    def _inside(self, path: str) -> epath.Path:
        try:
            return self._folder.inside(path.lstrip("/"))
        except UserError as error:  # it names the folder, which is nothing for the client
            raise UserError("it is not in the folder of the images") from error

    def _authorization(self) -> dict[str, str]:
        """Return the HTTP header that authorizes requests to the Label Studio server; {} without a token.

        The token is in the environment variable TOKEN. A legacy token is sent as it is. A personal access token, which
        has two dots, is first exchanged for a short-lived access token.
        """
        token = os.environ.get(TOKEN, "")
        if token.count(".") != 2:
            return {"Authorization": f"Token {token}"} if token else {}
        answer = self._fetch(
            f"{self._server}/api/token/refresh/",
            MIB,
            headers={"Content-Type": "application/json"},
            body=json.dumps({"refresh": token}).encode(),
        )
        return {"Authorization": f"Bearer {json.loads(answer)['access']}"}
