"""A Hugging Face hub in this process, to which the HTTP client of its library sends every request.

Limits: one user with one token; a branch has one commit; files are uploaded within their commit, whatever their size;
no redirects, ranges or long lists.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import _http

http = getattr(_http, "httpx2", None) or _http.httpx  # its name in later and in earlier versions of the library
TOKEN = "hf_secretsecretsecret"
LARGE = (".safetensors", ".npz")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def reply(value=None, status: int = 200, code: str = "") -> http.Response:
    return http.Response(status, json={} if value is None else value, headers={"X-Error-Code": code})


def refuse(status: int, code: str = "") -> http.Response:
    return reply(None, status, code)


class Hub:
    """The hub. repositories: name -> branch -> file -> content; private: those that need the token. The name of a data
    set begins with datasets/.

    fail: part of a path -> (status, error code) of the response. lies: file, or "" for the model -> what the hub says.
    requests: (method, path, body).
    """

    def __init__(self):
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private, self.fail, self.lies, self.requests = set(), {}, {}, []

    def commit_of(self, repository: str, branch: str) -> str:
        return sha256(repr((branch, self.repositories[repository][branch])).encode())[:40]

    def respond(self, request) -> http.Response:
        path, body = request.url.raw_path.decode().partition("?")[0], request.read()
        self.requests.append((request.method, path, body))
        for part, answer in self.fail.items():
            if part in path:
                return refuse(*answer)
        known = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        match path.strip("/").split("/"):
            case ["api", "repos", "create"]:
                return self.create(json.loads(body)) if known else refuse(401)
            case ["api", "validate-yaml"]:
                return reply()
            case ["api", "datasets", user, name, *action] | ["datasets", user, name, *action]:
                repository = f"datasets/{user}/{name}"
            case ["api", "models", user, name, *action] | [user, name, *action]:
                repository = f"{user}/{name}"
        if repository not in self.repositories or (repository in self.private and not known):
            return refuse(404 if known else 401, "RepoNotFound")
        match action:
            case ["resolve", revision, *name]:
                return self.read(repository, revision, "/".join(name))
            case [] | ["revision", _]:
                return self.read(repository, *action[1:])
        return self.change(repository, *map(unquote, action), body) if known else refuse(403)

    def create(self, asked: dict) -> http.Response:
        name = f"{asked.get('organization', 'user')}/{asked['name']}"
        if name not in self.repositories and (asked.get("private") or asked.get("visibility") == "private"):
            self.private.add(name)  # as earlier and as later libraries ask
        self.repositories.setdefault(name, {"main": {}})
        return reply({"url": f"{constants.ENDPOINT}/{name}"})

    def read(self, repository: str, revision: str = "main", name: str = "") -> http.Response:
        """Respond with a file, or with the description of a revision."""
        branches = self.repositories[repository]
        commits = {branch: self.commit_of(repository, branch) for branch in branches}
        branch = next((branch for branch, commit in commits.items() if unquote(revision) in (branch, commit)), None)
        if branch is None:
            return refuse(404, "RevisionNotFound")
        files = branches[branch]
        if name in files:
            headers = {"X-Repo-Commit": commits[branch], "ETag": f'"{sha256(files[name])}"'}
            return http.Response(200, content=files[name], headers=headers)
        if name:
            return refuse(404, "EntryNotFound")
        siblings = [self.about(name, content) for name, content in files.items()]
        about = {"id": repository, "sha": commits[branch], "private": repository in self.private}
        return reply({**about, "siblings": siblings, **self.lies.get("", {})})

    def about(self, name: str, content: bytes) -> dict:
        about = {"rfilename": name, "size": len(content)}
        if name.endswith(LARGE):
            about["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 100}
        return about | self.lies.get(name, {})

    def change(self, repository: str, action: str, branch: str, body: bytes) -> http.Response:
        branches = self.repositories[repository]
        match action:
            case "branch":
                branches.setdefault(branch, dict(branches["main"]))
            case "tree":
                return reply([{"type": "file", "path": name, "size": 0, "oid": "b" * 40} for name in branches[branch]])
            case "preupload":
                mode = {"uploadMode": "regular", "shouldIgnore": False}
                return reply({"files": [{"path": file["path"], **mode} for file in json.loads(body)["files"]]})
            case "commit":
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        branches[branch][value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "deletedFile":
                        del branches[branch][value["path"]]
                commit = self.commit_of(repository, branch)
                url = f"{constants.ENDPOINT}/{repository}/commit/{commit}"
                return reply({"success": True, "commitOid": commit, "commitUrl": url})
        return reply()


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Let a hub respond to this process, with a token that may do everything."""
    hub = Hub()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("MLMOE_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    options = {"event_hooks": {"request": [_http.hf_request_event_hook]}, "follow_redirects": True}
    set_client_factory(lambda: http.Client(transport=http.MockTransport(hub.respond), **options))
    yield hub
    set_client_factory(_http.default_client_factory)
