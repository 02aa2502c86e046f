"""Addresses on the web: where a file's bytes are, also on the Hugging Face hub, and how they are asked for."""

import email.utils
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds, for connecting and for every read
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
HUB = re.compile(
    r"https://(?:huggingface\.co|hf\.co)/(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
)
SHA256 = re.compile(r"[0-9a-f]{64}")
_MAY_PASS = (408, 425, 429, 500, 502, 503, 504)


class Lost(Exception):
    """The transfer failed in a way that may pass. wait: seconds that the server asks for."""

    def __init__(self, reason: str, *, answered: bool = True, wait: float = 0.0):
        super().__init__(reason)
        self.answered, self.wait = answered, wait


class Refused(Exception):
    """The transfer failed in a way that trying again does not change."""


class Stale(Exception):
    """What an earlier try left is not a part of the file that the server has now."""


@dataclass(frozen=True)
class Source:
    """Where the bytes are. version: changes with the file; empty where only the answer to a request will tell."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    sha256: str = ""
    size: int = 0


# ------------------------------------------------------------------------------------------------ where the bytes are
def find_source(address: str) -> Source:
    """Return where the bytes of an address are, with what the hub says of a file of its own; raise Lost or Refused."""
    if found := HUB.fullmatch(address):
        return _hub_source(found["repo"], found["revision"], urllib.parse.unquote(found["file"]))
    return Source(address)


def _hub_source(repo: str, revision: str, file: str) -> Source:
    """Ask the Hugging Face hub for the commit, sha256 and size of a file, with the user's token and mirror.

    The library does not transfer the file: it deletes what has arrived when it is interrupted, and checks no sha256.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    url = hf_hub_url(repo, file, revision=revision, endpoint=endpoint)
    _require_safe(url)
    try:
        headers = build_hf_headers(library_name="mlmoe_jax")
        about = get_hf_file_metadata(url, headers=headers, timeout=TIMEOUT)
    except errors.OfflineModeIsEnabled as error:
        raise Refused("HF_HUB_OFFLINE forbids the network") from error
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{repo}"
        raise Refused(
            f"its licence must be accepted at {page}, and then HF_TOKEN be set or `hf auth login` be run"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise Refused(f"the hub has no repository {repo}, or does not show it without HF_TOKEN") from error
    except errors.HfHubHTTPError as error:
        raise _answered(error.response.status_code, error.response.headers) from error
    except Exception as error:  # the library has changed its transport, and so the errors, with each major version
        raise _no_connection(url, error) from error
    version = about.etag or ""
    return Source(
        hf_hub_url(repo, file, revision=about.commit_hash or revision, endpoint=endpoint),
        headers,
        version,
        version if SHA256.fullmatch(version) else "",
        about.size or 0,
    )


def _require_safe(address: str) -> None:
    """Raise Refused unless an address is https, or http on this machine."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL_HOSTS):
        raise Refused(f"'{address}' is no https address")


# ------------------------------------------------------------------------------------------------- asking for them
def open_source(source: Source, offset: int, version: str) -> http.client.HTTPResponse:
    """Ask for the file from `offset` on. urllib knows proxies, redirects and certificates, and is always there."""
    _require_safe(source.url)
    headers = {"User-Agent": "mlmoe_jax", "Accept-Encoding": "identity", **source.headers}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if not source.version:
            headers["If-Range"] = version
    try:
        opener = urllib.request.build_opener(_Redirects)
        return opener.open(urllib.request.Request(source.url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if offset and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise Stale from error
            raise _answered(error.code, error.headers) from error
    except (OSError, http.client.HTTPException) as error:
        raise _no_connection(source.url, error) from error


def read_chunk(response: http.client.HTTPResponse) -> bytes:
    """Return the next bytes of an answer, b"" at its end; raise Lost where the connection breaks off."""
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise Lost(f"the connection broke off ({_brief(error)})") from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects that do not leave https, and do not show a token to another host."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Return the request that follows a redirect."""
        _require_safe(newurl)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and following.host != req.host:
            following.remove_header("Authorization")
        return following


def _answered(code: int, headers: Mapping[str, str]) -> Lost | Refused:
    """Return what an HTTP status other than success means."""
    if code in _MAY_PASS:
        return Lost(f"the server answers {code}", wait=_seconds_asked_for(headers.get("Retry-After") or ""))
    meaning = {
        401: " (it wants a login)",
        403: " (it does not give this file to everyone)",
        404: " (there is no such file)",
        410: " (the file is there no more)",
    }
    return Refused(f"the server answers {code}{meaning.get(code, '')}")


def _seconds_asked_for(retry_after: str) -> float:
    """Read a Retry-After header, a number of seconds or a date."""
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        return (email.utils.parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def _no_connection(url: str, error: Exception) -> Lost:
    return Lost(f"{urllib.parse.urlsplit(url).hostname} cannot be reached ({_brief(error)})", answered=False)


def _brief(error: Exception) -> str:
    """Return what an error says as a part of a sentence."""
    reason = getattr(error, "reason", error)
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return text.partition("\n")[0].partition(". ")[0].rstrip(".")


def version_of(response: http.client.HTTPResponse) -> str:
    """Return what identifies the file's present content for If-Range: a strong ETag or the time it was changed."""
    tag = response.headers.get("ETag") or ""
    return tag if tag.startswith('"') else response.headers.get("Last-Modified") or ""
