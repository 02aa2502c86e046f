"""HTTP requests for published files: the location of a file, also on the Hugging Face hub, and the transfer."""

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
    """The transfer failed for a reason that may be temporary. wait: seconds that the server asks the client to wait.

    answered: whether there was any response.
    """

    def __init__(self, reason: str, *, answered: bool = True, wait: float = 0.0):
        super().__init__(reason)
        self.answered, self.wait = answered, wait


class Refused(Exception):
    """The transfer failed for a reason that a retry does not change."""


class Stale(Exception):
    """The bytes of an earlier attempt are not a part of the file that the server has now."""


@dataclass(frozen=True)
class Source:
    """The location of a file. version: changes with the file; empty if only the response to a request has it."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    sha256: str = ""
    size: int = 0


# ----------------------------------------------------------------------------------------------------------- location
def find_source(address: str) -> Source:
    """Return the source of an address, for files on the hub with the hub's metadata; raise Lost or Refused."""
    if found := HUB.fullmatch(address):
        return _hub_source(found["repo"], found["revision"], urllib.parse.unquote(found["file"]))
    return Source(address)


def _hub_source(repo: str, revision: str, file: str) -> Source:
    """Request the commit, sha256 and size of a file from the Hugging Face hub, with the user's token and mirror.

    The library is not used for the transfer: if interrupted it deletes the partial file, and it checks no sha256.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    url = hf_hub_url(repo, file, revision=revision, endpoint=endpoint)
    require_safe(url)
    try:
        headers = build_hf_headers(library_name="mlmoe_jax")
        about = get_hf_file_metadata(url, headers=headers, timeout=TIMEOUT)
    except errors.OfflineModeIsEnabled as error:
        raise Refused("HF_HUB_OFFLINE is set") from error
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{repo}"
        raise Refused(f"its licence has to be accepted at {page}, and HF_TOKEN set or `hf auth login` run") from error
    except errors.RepositoryNotFoundError as error:
        raise Refused(f"the hub has no repository {repo}, or does not show it without HF_TOKEN") from error
    except errors.HfHubHTTPError as error:
        raise _answered(error.response.status_code, error.response.headers) from error
    except Exception as error:  # each major version of the library changed its transport, and with it the errors
        raise _no_connection(url, error) from error
    version = about.etag or ""
    return Source(
        hf_hub_url(repo, file, revision=about.commit_hash or revision, endpoint=endpoint),
        headers,
        version,
        version if SHA256.fullmatch(version) else "",
        about.size or 0,
    )


def require_safe(address: str) -> None:
    """Raise Refused unless an address is https, or http on this machine."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL_HOSTS):
        raise Refused(f"'{address}' is not an https address")


# -------------------------------------------------------------------------------------------------------- transfer
def open_source(source: Source, offset: int, version: str) -> http.client.HTTPResponse:
    """Request the file starting at byte `offset`; raise Lost, Refused or Stale.

    urllib handles proxies, redirects and certificates, and is always installed.
    """
    require_safe(source.url)
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
    """Return the next bytes of a response, b"" at its end; raise Lost if the connection breaks."""
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise Lost(f"the connection was lost ({brief(error)})") from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects that stay on https, without sending a token to another host."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Return the request that follows a redirect."""
        require_safe(newurl)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and following.host != req.host:
            following.remove_header("Authorization")
        return following


def _answered(code: int, headers: Mapping[str, str]) -> Lost | Refused:
    """Return the exception for an HTTP status other than success."""
    if code in _MAY_PASS:
        return Lost(f"the server responds with {code}", wait=_retry_seconds(headers.get("Retry-After") or ""))
    meaning = {
        401: " (login required)",
        403: " (access denied)",
        404: " (file not found)",
        410: " (file removed)",
    }
    return Refused(f"the server responds with {code}{meaning.get(code, '')}")


def _retry_seconds(retry_after: str) -> float:
    """Return the seconds until a Retry-After header, which holds a number of seconds or a date; 0 for neither."""
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        return (email.utils.parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def _no_connection(url: str, error: Exception) -> Lost:
    return Lost(f"{urllib.parse.urlsplit(url).hostname} cannot be reached ({brief(error)})", answered=False)


def brief(error: Exception) -> str:
    """Return the message of an error in a form that fits into a sentence."""
    reason = getattr(error, "reason", error)
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return text.partition("\n")[0].partition(". ")[0].rstrip(".")


def version_of(response: http.client.HTTPResponse) -> str:
    """Return the If-Range value that identifies the file's current content: a strong ETag or the modification time."""
    tag = response.headers.get("ETag") or ""
    return tag if tag.startswith('"') else response.headers.get("Last-Modified") or ""
