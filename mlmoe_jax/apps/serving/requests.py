"""Reading a request: its options, its images, and the refusals that do not depend on the model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

RAW = "application/octet-stream"
MULTIPART = "multipart/form-data"
_LONGEST_NAME = 200
_MOST_DROPPED = 64 << 20  # bytes of a body that is too large
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class Refused(Exception):
    """A request with an answer other than results: its status, one sentence, and headers."""

    def __init__(self, status: int, reason: str, **headers: str):
        super().__init__(reason)
        self.status, self.reason = status, reason
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True)
class Options:
    """The options in the query of a request."""

    top_k: int | None = None
    gates: bool = False
    attention: bool = False


def options_of(query: Mapping[str, str]) -> Options:
    """Return the options of a query; Refused for others, and for values that cannot be read."""
    found = {}
    for name, text in query.items():
        if name == "top_k":
            if not (text.isascii() and text.isdigit() and len(text) < 7):
                raise Refused(422, "top_k should be an integer above 0")
            found[name] = int(text)
        elif name in ("gates", "attention"):
            if text not in _FLAGS:
                raise Refused(422, f"{name} should be true or false")
            found[name] = _FLAGS[text]
        else:
            raise Refused(422, "the query should have only top_k, gates and attention")
    return Options(**found)


def content_type_of(headers: Headers) -> str:
    """Return the kind of a body, RAW or MULTIPART; Refused if it is neither."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == MULTIPART:
        return kind
    if kind == RAW or kind.startswith("image/"):
        return RAW
    raise Refused(415, f"the content type should be {MULTIPART}, image/… or {RAW}")


async def images_of(request: Request, kind: str, *, most_bytes: int, most_images: int) -> list[tuple[str, bytes]]:
    """Return (name, content) of each image of a request; Refused if there are none, or more or larger ones.

    kind: as `content_type_of` returns it. Names are those that the client gives, or numbers.
    """
    if kind == RAW:
        content = b"".join([part async for part in _limited(request, most_bytes)])
        images = [("image 0", content)]
    else:
        parser = _Files(request.headers, _limited(request, most_bytes), max_files=most_images, max_fields=most_images)
        parser.spool_max_size = 2 * most_bytes  # never on disk
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, ValueError) as error:
            raise Refused(400, f"the body should be {MULTIPART} with 1 to {most_images} files") from error
        if not parser.complete:
            raise Refused(400, "the body is cut short")
        try:
            files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
            images = [(_name(file, at), await file.read()) for at, file in enumerate(files)]
        finally:
            await form.close()
    if not any(content for _, content in images):
        raise Refused(422, "the request has no image")
    return images


class _Files(MultiPartParser):
    """A parser that knows whether it has read the end of the form: a form that is cut short is no error otherwise."""

    complete = False

    def on_end(self) -> None:
        self.complete = True


def _name(file: UploadFile, at: int) -> str:
    name = "".join(letter for letter in (file.filename or "") if letter.isprintable())[:_LONGEST_NAME]
    return name or f"image {at}"


async def _limited(request: Request, most: int) -> AsyncIterator[bytes]:
    """Yield the body of a request; Refused if it is too large.

    Many clients read no answer before they have sent everything: the rest of a body is read and dropped, unless the
    client waits for a sign to send it, or there is too much of it.
    """
    too_large = Refused(413, f"the request has more than {most:,} bytes", Connection="close")
    declared = int(request.headers.get("content-length", "0"))
    if declared > most and "expect" in request.headers:
        raise too_large
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most + _MOST_DROPPED:
            raise too_large
        if max(size, declared) <= most:
            yield part
    if max(size, declared) > most:
        raise too_large
