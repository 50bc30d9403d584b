"""A small web server that answers as the Hugging Face hub does, for one repository with one commit."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
from collections.abc import Mapping
from typing import Any

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_secret"


class Hub(http.server.ThreadingHTTPServer):
    """Repository organization/name with the files; those that end in .safetensors are in large file storage."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(files)
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        """The address, as HF_ENDPOINT takes it."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "no access"})
        if re.fullmatch(r"/api/models/organization/name(/revision/[^/]+)?", path):
            siblings = [{"rfilename": name} for name in self.server.files]
            return self._json({"id": "organization/name", "sha": COMMIT, "siblings": siblings})
        if re.fullmatch(r"/api/models/organization/name/tree/[^/]+/?", path):
            return self._json([_entry(name, content) for name, content in self.server.files.items()])
        if re.fullmatch(r"/api/models/organization/name/paths-info/[^/]+", path):
            return self._json([_entry(name, content) for name, content in self.server.files.items()])
        if found := re.fullmatch(rf"/organization/name/resolve/{COMMIT}/(.+)", path):
            content = self.server.files.get(found[1])
            if content is not None:
                return self._file(content)
        return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _file(self, content: bytes) -> None:
        etag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._send(200, content, {**etag, "Accept-Ranges": "bytes"})
        first, last = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
        part = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        return self._send(206, content[first : last + 1], {**etag, **part})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _entry(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob}
    if name.endswith(".safetensors"):
        oid = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
    return entry
