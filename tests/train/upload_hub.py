"""A Hugging Face Hub on localhost that takes uploads: repositories, large files and commits."""

from __future__ import annotations

import base64
import hashlib
import json
from threading import Lock
from typing import Any

from tests.train.fake_hub import LocalHandler, LocalHub


class UploadHub(LocalHub):
    """A hub that takes uploads.

    Args:
        token: Token that may write.

    Attributes:
        repos: By id, whether the repository is private, and the contents of its files by name.
        stored: Large files by sha256.
        writes: Paths of all requests that send something.
        fail_after: Number of large files after which further ones are refused; None: none is.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.repos: dict[str, tuple[bool, dict[str, bytes]]] = {}
        self.stored: dict[str, bytes] = {}
        self.writes: list[str] = []
        self.puts = 0
        self.fail_after: int | None = None
        self.lock = Lock()
        super().__init__(_Handler)


class _Handler(LocalHandler):
    hub: UploadHub

    def do_GET(self) -> None:
        if self.is_silent():
            return None
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        if name not in self.hub.repos:
            return self._answer(404, {}, {"X-Error-Code": "RepoNotFound"})
        private, files = self.hub.repos[name]
        self._answer(200, {"id": name, "sha": "0" * 40, "private": private, "siblings": []})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.is_silent():
            return None
        with self.hub.lock:
            self.hub.puts += 1
            if self.hub.fail_after is not None and self.hub.puts > self.hub.fail_after:
                return self._answer(400, {"error": "the line is cut"})
            self.hub.stored[self.path.rpartition("/")[2]] = body
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, path = self.hub, self.path.partition("?")[0]
        if self.is_silent():
            return None
        hub.writes.append(path)
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            if name in hub.repos:
                return self._answer(409, {"error": "You already created this model repo", "url": name})
            private = given.get("private", given.get("visibility") == "private")
            hub.repos[name] = (private, {})
            return self._answer(200, {"url": f"{hub.address}/{name}"})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = []
            for one in json.loads(body)["objects"]:
                upload = {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}
                objects.append(one if one["oid"] in hub.stored else {**one, "actions": upload})
            return self._answer(
                200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"}
            )
        name = path.removeprefix("/api/models/").removesuffix("/commit/main")
        _, kept = hub.repos[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                kept[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                data = hub.stored[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                kept[value["path"]] = data
        self._answer(200, {"commitUrl": f"{hub.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
