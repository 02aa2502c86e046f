"""What somebody else sends or shares: requests to the server, tokenizers, models."""

import asyncio
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from fastapi import HTTPException
from hypothesis import strategies as st
from safetensors.numpy import save
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlmoe_jax.apps.serving.connections import LimitedConnection
from mlmoe_jax.apps.serving.request_images import LIMITS, read_request_images
from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.pretrained.tokenizers import open_tokenizer
from mlmoe_jax.runs.folder import RunFolder
from tools.fuzz.hostile import (
    TEXTS,
    Case,
    Silent,
    array,
    damaged,
    damaged_json,
    damaged_npz,
    encoded,
    with_changed_value,
    write,
)

_HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\n"
_FORM = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n%s\r\n--b--\r\n'


# ------------------------------------------------------------------------------------------------------------- requests
def requests(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Requests with bodies of a given length, in chunks and in forms, with damage anywhere, in pieces of any size."""
    kind, body = draw(st.sampled_from(((b"image/png", b"x" * 300), (b"multipart/form-data; boundary=b", _FORM % b"y"))))
    if draw(st.booleans()):
        size = draw(st.sampled_from((1, 7, 100)))
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        content = _HEAD % kind + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    else:
        content = _HEAD % kind + b"Content-Length: %d\r\n\r\n" % len(body) + body
    content = damaged(draw, content) * draw(st.integers(1, 3))
    size = draw(st.sampled_from((1, 50, len(content) + 1)))
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    return repr(content[:200]), lambda: asyncio.run(_serve(pieces))


async def _serve(pieces: list[bytes]) -> None:
    """Give bytes to a connection whose application reads the images of each request. Raise its errors."""
    failures: list[Exception] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            await read_request_images(Request(scope, receive), LIMITS)
        except HTTPException as error:
            status = error.status_code
        except ClientDisconnect:
            return
        except Exception as error:
            failures.append(error)
        await Response(status_code=status)(scope, receive, send)

    config = SimpleNamespace(
        loaded=True,
        loaded_app=app,
        ws_protocol_class=None,
        root_path="",
        asgi_version="3.0",
        limit_concurrency=None,
        timeout_keep_alive=5,
        reset_contextvars=False,
    )
    state = SimpleNamespace(connections=set(), tasks=set(), default_headers=[], total_requests=0)
    connection = LimitedConnection(config, state, {}, refuse=lambda: None, drop=lambda: None)
    transport = _Transport()
    connection.connection_made(transport)
    for piece in pieces:
        if transport.is_closing():
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.gather(*state.tasks)
    if failures:
        raise failures[0]


class _Transport(asyncio.Transport):
    """A transport without a socket."""

    closed = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


# ----------------------------------------------------------------------------------------------------------- tokenizers
_ODD = (
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Removed", "invert": False}},
    {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0]], "byte_fallback": False}},
    {"model": {"type": "WordLevel", "unk_token": "u", "vocab": {}}},
)


def tokenizers(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Tokenizers of small text towers with damage, which then encode texts."""
    _import_helpers()
    from helpers import text_towers

    name = draw(st.sampled_from(sorted(text_towers.BACKBONES)))
    content = text_towers.tokenizer_file(name).read_bytes()
    if draw(st.integers(0, 4)) == 0:
        content = json.dumps(json.loads(content) | draw(st.sampled_from(_ODD))).encode()
    else:
        content = damaged_json(draw, content)
    path, texts = write(place / "tokenizer.json", content), draw(st.lists(TEXTS, min_size=1, max_size=3))
    entry = text_towers.small_entry(name)

    def act() -> None:
        open_tokenizer(path, entry).encode([text.encode(errors="replace").decode() for text in texts])

    return f"{name} {content[:150]!r} {texts}"[:300], act


# ------------------------------------------------------------------------------------------------------- names, vectors
_ODD_NAMES = (
    "Dog\ndog",
    "dog, cat",
    "# animals",
    "1. dog",
    "n02084071 dog",
    "a\tb\tc",
    "\u202edog",
    "\x1b[31m",
    "nan",
    "=1",
)


def names(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Lists of names, with damage."""
    lines = draw(st.lists(st.one_of(st.sampled_from(_ODD_NAMES), TEXTS), max_size=6))
    path = write(place / "names.txt", damaged(draw, "\n".join(lines).encode(errors="surrogatepass")))
    return repr(lines)[:300], partial(_read_names, path)


def vectors(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Files of vectors of names, with another name, array or entry of the header, or with damage."""
    count, arrays = 3, {}
    for name, shape in {"vectors": (count, 4), "background": (4,), "projection": (8, 4)}.items():
        kept = draw(st.integers(0, 5))
        arrays[name] = np.ones(shape, np.float32) if kept else array(draw)
    about = {
        "names": ["sea", "sun", "sand"],
        "templates": ["{}"],
        "descriptions": [],
        "backbone": "vit_digits",
        "fingerprint": "",
        "scale": 1.0,
        "bias": 0.0,
    }
    about = about if draw(st.booleans()) else with_changed_value(draw, about)
    if isinstance(about, dict) and draw(st.booleans()):
        about["names"] = draw(st.lists(st.one_of(st.sampled_from(_ODD_NAMES), TEXTS), min_size=count, max_size=count))
    try:
        content = save(arrays, {"mlmoe_jax": json.dumps(about)})
    except Exception:  # an array or a text that the library does not write
        content = b""
    path = write(place / "v.safetensors", damaged(draw, content) if draw(st.integers(0, 3)) == 0 else content)
    return f"{about}"[:300], partial(_read_names, path)


def _read_names(path: Path) -> None:
    """Read names, which must be printable and different."""
    found = read_classes(path)
    if len(set(found)) < len(found) or not all(name.strip() and name.isprintable() for name in found):
        raise Silent(f"{found} are taken as names")


# -------------------------------------------------------------------------------------------------------- shared models
_TAMPERED = ("config.json", "label_space.npz", "labels.txt", "thresholds.json", "adapter.safetensors", "backbone.json")


def prepare_shared(base: Path) -> None:
    """Copy the model that comes with the package."""
    from mlmoe_jax.runs.shared_model import run_folder

    shutil.copytree(run_folder("demo:photographs").path, base / "shared")


def shared_model(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """A shared model with damage in one file, which labels an image."""
    from mlmoe_jax.inference.predictor import Predictor

    shutil.copytree(base / "shared", place / "shared")
    path = place / "shared" / draw(st.sampled_from(_TAMPERED))
    damage = {".json": damaged_json, ".npz": damaged_npz}.get(path.suffix, damaged)
    path.write_bytes(content := damage(draw, path.read_bytes()))
    image = encoded()
    return f"{path.name} {content[:150]!r}", partial(
        lambda: Predictor.from_run(RunFolder(place / "shared").path)(image)
    )


def _import_helpers() -> None:
    folder = str(Path(__file__).parents[2] / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
