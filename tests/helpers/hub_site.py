"""A local Hugging Face hub with the few routes that its library uses to share and to download models."""

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

TOKEN = "hf_secretsecretsecret"
LARGE = (".safetensors", ".npz")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hub(ThreadingHTTPServer):
    """The hub. repositories: name -> branch -> file -> content; private: those that need the token.

    fail: the status with which to respond to each request whose path contains the key. lies: file -> the size that the
    hub says it has. requests: (method, path, body).
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.stored: dict[str, bytes] = {}
        self.private, self.fail, self.lies, self.requests = set(), {}, {}, []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit_of(self, repository: str, revision: str) -> str:
        branches = self.repositories[repository]
        files = branches.get(revision, {})
        return sha256(json.dumps([revision, sorted((name, sha256(c)) for name, c in files.items())]).encode())[:40]

    def branch_of(self, repository: str, revision: str) -> str | None:
        """Return the branch with the name, or the commit, `revision`."""
        branches = self.repositories[repository]
        return next((b for b in branches if revision in (b, self.commit_of(repository, b))), None)


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def respond(self, value=None, status=200, headers=(), content=None):
        body = json.dumps(value).encode() if content is None else content
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if content is None else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        for name, text in dict(headers).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str = ""):
        self.respond({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def handle_one(self):
        hub, length = self.server, int(self.headers["Content-Length"] or 0)
        body, path = self.rfile.read(length), urllib.parse.urlsplit(self.path).path
        hub.requests.append((self.command, path, body))
        for part, status in hub.fail.items():
            if part in path:
                return self.refuse(status)
        known = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if path == "/api/repos/create":
            return self.create(json.loads(body), known)
        if path == "/api/validate-yaml":
            return self.respond({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            hub.stored[found[1]] = body
            return self.respond({})
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git/info/lfs/objects/(batch)|/(.*))?", path)
        repository, action = found[1], found[2] or found[3] or ""
        if repository not in hub.repositories or (repository in hub.private and not known):
            return self.refuse(404 if known else 401, "RepoNotFound")
        return self.in_repository(repository, action, body, known)

    do_GET = do_POST = do_PUT = do_HEAD = handle_one

    def create(self, asked: dict, known: bool):
        hub, name = self.server, f"{asked.get('organization', 'user')}/{asked['name']}"
        if not known:
            return self.refuse(401)
        if name in hub.repositories:
            return self.respond({"error": "exists", "url": f"{hub.address}/{name}"}, 409)
        hub.repositories[name] = {"main": {}}
        if asked.get("private") or asked.get("visibility") == "private":  # of earlier and of later libraries
            hub.private.add(name)
        return self.respond({"url": f"{hub.address}/{name}"})

    def in_repository(self, repository: str, action: str, body: bytes, known: bool):
        hub, (verb, _, rest) = self.server, action.partition("/")
        branches = hub.repositories[repository]
        if verb in ("", "revision"):
            branch = hub.branch_of(repository, urllib.parse.unquote(rest) or "main")
            if branch is None:
                return self.refuse(404, "RevisionNotFound")
            return self.respond(self.about(repository, branch))
        if verb == "resolve":
            commit, _, name = rest.partition("/")
            content = branches.get(hub.branch_of(repository, commit), {}).get(name)
            if content is None:
                return self.refuse(404, "EntryNotFound")
            linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
            headers = {"X-Repo-Commit": commit, "ETag": '"pointer"', **(linked if name.endswith(LARGE) else {})}
            return self.respond(content=content, headers=headers)
        if not known:
            return self.refuse(403)
        if verb == "tree":
            files = branches[urllib.parse.unquote(rest)]
            entries = [{"type": "file", "path": name, "size": 0, "oid": "b" * 40} for name in files]
            return self.respond(entries)
        if verb == "branch":
            branches.setdefault(urllib.parse.unquote(rest), dict(branches["main"]))
            return self.respond({})
        if verb == "preupload":
            asked = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular"} for f in asked
            ]
            return self.respond({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if verb == "batch":
            objects = json.loads(body)["objects"]
            upload = [{**o, "actions": {"upload": {"href": f"{hub.address}/lfs/{o['oid']}"}}} for o in objects]
            return self.respond({"transfer": "basic", "objects": upload})
        if verb == "commit":
            return self.commit(repository, urllib.parse.unquote(rest), body)
        return self.refuse(404)

    def about(self, repository: str, branch: str) -> dict:
        hub = self.server
        siblings = []
        for name, content in hub.repositories[repository][branch].items():
            size = hub.lies.get(name, len(content))
            lfs = {"sha256": sha256(content), "size": size, "pointerSize": 100} if name.endswith(LARGE) else None
            siblings.append({"rfilename": name, "size": size, "blobId": "b" * 40, **({"lfs": lfs} if lfs else {})})
        about = {"id": repository, "modelId": repository, "sha": hub.commit_of(repository, branch), "tags": []}
        return {**about, "private": repository in hub.private, "siblings": siblings}

    def commit(self, repository: str, branch: str, body: bytes):
        hub = self.server
        files = hub.repositories[repository][branch]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = hub.commit_of(repository, branch)
        url = f"{hub.address}/{repository}/commit/{oid}"
        return self.respond({"success": True, "commitOid": oid, "commitUrl": url})


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub that this process takes for the real one, with a token that may do everything."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("MLMOE_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()
