"""The ML backend of Label Studio: its server asks for predictions of tasks at /label_studio (docs/labels.md).

The addresses of images come from whoever can reach this server. So an image is only taken from the request itself
(data:image/…), from the folder `serve.folder`, or from the Label Studio server `serve.label_studio`, whose redirects to
another server are refused. The host and the token that Label Studio sends are not used.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

from etils import epath
from fastapi import FastAPI, HTTPException, Request

from mlmoe_jax.apps.serving.service import Options, Service
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.data.sources.label_studio_export import LOCAL_FILES, Control, prediction, read_address, read_controls
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import open_regular, read_stream
from mlmoe_jax.runtime.storage import Folder

PREFIX = "/label_studio"
TOKEN = "LABEL_STUDIO_API_KEY"  # environment variable
SECONDS = 10.0  # time limit to fetch one image


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of the ML backend to the application of a service; UserError as of `TaskImages`."""
    version, serve = service.labeler.predictor.version, service.labeler.predictor.run.config.serve
    images = TaskImages(serve.folder, serve.label_studio, service.labeler.limits.megabytes << 20)

    @app.get(f"{PREFIX}/health", include_in_schema=False)
    async def ml_health() -> dict[str, str]:
        """Return the status 200, also while the model is compiled, because Label Studio waits for one second."""
        return {"status": "UP", "model_class": version}

    @app.post(f"{PREFIX}/setup", include_in_schema=False)
    async def ml_setup() -> dict[str, str]:
        """Return the name of the model."""
        return {"model_version": version}

    @app.post(f"{PREFIX}/predict", include_in_schema=False)
    async def ml_predict(request: Request) -> dict[str, Any]:
        """Return a list of predictions per task: one, or none if its image cannot be read."""
        body, labels = await service.body(request), service.labeler.predictor.names
        tasks, (control, (to, key, known)) = await service.in_reader(_parse, body, labels)
        results: list[dict[str, Any]] = []
        for start in range(0, len(tasks), service.most_images):
            addresses = [task["data"].get(key) for task in tasks[start : start + service.most_images]]
            try:
                results += await service.results(request, Options(), images=partial(images.read_all, addresses))
            except HTTPException as error:
                if error.status_code != 422:
                    raise
                results += [{"error": error.detail}] * len(addresses)
        if all("error" in result for result in results):
            raise HTTPException(422, results[0]["error"])
        predictions = []
        for result in results:  # Label Studio refuses labels that are not among the project's choices
            names = [label for label in result.get("labels", ()) if not known or label in known]
            scores = result.get("scores")
            predictions.append([prediction(names, scores, version, control=control, image=to)] if scores else [])
        return {"model_version": version, "results": predictions}


def _parse(body: bytes, labels: Sequence[str]) -> tuple[list[dict[str, Any]], tuple[str, Control]]:
    """Return the tasks of a request, and its Choices with the most of the `labels`, as in `read_controls`.

    Raises HTTPException if the request is of another form.
    """
    try:
        content = json.loads(body)
        tasks, controls = content["tasks"], read_controls(content["label_config"].encode())
        if not all(isinstance(task["data"], dict) for task in tasks):
            raise TypeError
    except Exception as error:  # parsers raise errors of many types for content of another form
        raise HTTPException(
            400, "the body should be JSON with tasks and a label_config, as Label Studio sends"
        ) from error
    if not tasks or not controls:
        raise HTTPException(422, "there are no tasks" if controls else "the label_config has no Choices for an Image")
    return tasks, max(controls.items(), key=lambda control: sum(label in control[1].values for label in labels))


class TaskImages:
    """Reads the images of tasks.

    Args:
      folder: folder of the images at /data/local-files, and without a server also of uploaded images; "" for none.
      server: address of the Label Studio server; "" for none.
      most_bytes: limit of an image.

    Raises:
      UserError: there is no such folder, or the address is not of a server.
    """

    def __init__(self, folder: str, server: str, most_bytes: int):
        if folder and not os.path.isdir(os.path.expanduser(folder)):
            raise UserError(f"serve.folder={folder} is not a folder; set it to the folder of the images")
        if server and not server.startswith(("http://", "https://")):
            raise UserError(f"serve.label_studio={server} should begin with http:// or https://")
        self._folder = Folder(os.path.expanduser(folder)) if folder else None
        self._server, self.most_bytes = server.rstrip("/"), most_bytes

    async def read_all(self, addresses: Sequence[Any]) -> list[tuple[str, bytes | BadImage]]:
        """Return (name, content) of each image, or the error of an image that cannot be read."""
        return await asyncio.gather(*(asyncio.to_thread(self._read, address) for address in addresses))

    def _read(self, address: Any) -> tuple[str, bytes | BadImage]:
        name = str(address)[:100]
        try:
            if not isinstance(address, str):
                raise UserError("the task has no address of an image")
            return name, self.read(address)
        except (UserError, OSError, ValueError, http.client.HTTPException) as error:
            return name, BadImage(f"cannot read {name} as an image: {reason_of(error)}")

    def read(self, address: str) -> bytes:
        """Return the image of a task.

        Raises UserError, OSError, ValueError or HTTPException if the address is not allowed or cannot be read.
        """
        if address.startswith("data:"):
            return base64.b64decode(address.partition("base64,")[2], validate=True)
        if self._folder and (not self._server or urlsplit(address).path.rstrip("/") == LOCAL_FILES):
            with open_regular(self._inside(read_address(address))) as file:
                return read_stream(file, self.most_bytes)
        if not self._server:
            raise UserError("set serve.folder to the folder of the images, or serve.label_studio to the server")
        return self._fetch(urljoin(f"{self._server}/", address))

    def _inside(self, path: str) -> epath.Path:
        try:
            return self._folder.inside(path.lstrip("/"))
        except UserError as error:  # it names the folder, which is nothing for the client
            raise UserError("it is not in the folder of the images") from error

    def _fetch(self, address: str) -> bytes:
        opener = urllib.request.build_opener(_SameServer(self._server))
        if not _SameServer.allows(self._server, address):
            raise UserError(f"it is not on the server {self._server}")
        with opener.open(urllib.request.Request(address, headers=self._token(opener)), timeout=SECONDS) as answer:
            return read_stream(answer, self.most_bytes)

    def _token(self, opener: urllib.request.OpenerDirector) -> dict[str, str]:
        """Return the header for the token: a legacy token, or one that is exchanged for an access token."""
        token = os.environ.get(TOKEN, "")
        if token.count(".") != 2:
            return {"Authorization": f"Token {token}"} if token else {}
        body, kind = json.dumps({"refresh": token}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._server}/api/token/refresh/", body, kind)
        with opener.open(request, timeout=SECONDS) as answer:
            return {"Authorization": f"Bearer {json.loads(read_stream(answer, 1 << 20))['access']}"}


class _SameServer(urllib.request.HTTPRedirectHandler):
    def __init__(self, server: str):
        self._server = server

    @staticmethod
    def allows(server: str, address: str) -> bool:
        ours, theirs = urlsplit(server), urlsplit(address)
        return (ours.scheme, ours.netloc) == (theirs.scheme, theirs.netloc)

    def redirect_request(self, request, file, code, message, headers, address):
        if not self.allows(self._server, address):
            raise urllib.error.URLError("it redirects to another server")
        return super().redirect_request(request, file, code, message, headers, address)
