"""`cory export --push` to a fake hub in this process, which implements the required part of the real API."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from launch.main import main
from launch.run_folder.run import Run
from tests.launch.conftest import Cory

OWNER_TOKEN, READ_TOKEN = "hf_owner", "hf_guest"
"""Valid tokens with and without write access."""
MODEL = "me/model"


class FakeHub(ThreadingHTTPServer):
    """A hub with one model."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.private: bool | None = None
        """None: the model does not exist."""
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        """Checksum to the content of a large file; commits refer to the checksum."""
        self.commits: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def send_json(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.path == "/api/whoami-v2":
            if token in (OWNER_TOKEN, READ_TOKEN):
                self.send_json({"name": "me", "type": "user"})
            else:
                self.send_json({"error": "Invalid user token."}, 401)
        elif self.path == f"/api/models/{MODEL}" and self.server.private is not None:
            self.send_json({"id": MODEL, "private": self.server.private})
        else:
            self.send_json({"error": f"Not found: {self.path}"}, 404)

    def do_PUT(self) -> None:
        self.server.stored[self.path.rpartition("/")[2]] = self.body()
        self.send_json({})

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        if self.path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif OWNER_TOKEN not in self.headers.get("Authorization", ""):
            self.send_json({"error": "You don't have the rights to do this"}, 403)
        elif self.path == "/api/repos/create":
            exists = hub.private is not None
            hub.private = hub.private if exists else json.loads(body).get("visibility") == "private"
            self.send_json({"url": f"{hub.address}/{MODEL}", "error": "exists"}, 409 if exists else 200)
        elif self.path == f"/api/models/{MODEL}/preupload/main":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {True: "lfs", False: "regular"}
            files = [{"path": p, "uploadMode": modes[p.endswith("s")], "shouldIgnore": False} for p in paths]
            self.send_json({"files": files})
        elif self.path == f"/{MODEL}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            uploads = [{**o, "actions": {"upload": {"href": f"{hub.address}/lfs/{o['oid']}"}}} for o in objects]
            self.send_json({"transfer": "basic", "objects": uploads})
        elif self.path == f"/api/models/{MODEL}/commit/main":
            self.commit([json.loads(line) for line in body.splitlines()])
            self.send_json({"commitUrl": f"{hub.address}/{MODEL}/commit/a1", "commitOid": "a1", "success": True})
        else:
            self.send_json({"error": f"Not found: {self.path}"}, 404)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            else:
                self.server.files[value["path"]] = self.server.stored[value["oid"]]

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A fake hub, configured as the hub of this process together with a token with write access."""
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # a test that ran before may not have reached the real hub
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet uploads large files to another service
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", OWNER_TOKEN)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_exported_folder_is_uploaded_in_one_commit(
    hub: FakeHub, policies_run: Run, tmp_path: Path, cory: Cory
) -> None:
    words = ["export", str(policies_run.path), "--policy", "llm_1", "--out", "out", "--push", MODEL, "--private"]
    environment = {"HF_ENDPOINT": hub.address, "HF_TOKEN": OWNER_TOKEN, "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_OFFLINE"] = "0"
    result = cory(*words, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"out: llm_1 after update 5, fp32, 17 MB.\n{hub.address}/{MODEL}\n"
    assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert {"README.md", "model.safetensors", "config.json"} <= set(hub.files)
    assert (hub.private, hub.commits) == (True, ["llm_1 after update 5, by cory-rllib"])


def export_and_push(run: Run, out: Path, *words: str) -> int:
    return main(["export", str(run.path), "--policy", "llm_1", "--out", str(out), "--push", *(words or (MODEL,))])


def test_private_does_not_upload_to_an_existing_public_model(
    hub: FakeHub, policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.private = False
    assert export_and_push(policies_run, tmp_path / "out", MODEL, "--private") == 2
    error = capsys.readouterr().err
    page = f"{hub.address}/{MODEL}"
    assert f"{page} exists and is public. Make it private first. The model is in {tmp_path / 'out'}." in error
    assert not hub.files and (tmp_path / "out" / "README.md").exists()
    assert export_and_push(policies_run, tmp_path / "public") == 0 and "README.md" in hub.files


def test_a_token_without_write_access_is_reported_and_the_folder_remains(
    hub: FakeHub,
    policies_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    assert export_and_push(policies_run, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert f"--push {MODEL}: You don't have the rights to do this. The model is in {tmp_path / 'out'}." in error
    assert (tmp_path / "out" / "model.safetensors").exists() and hub.private is None and OWNER_TOKEN not in error


@pytest.mark.parametrize(
    ("token", "words", "message"),
    [
        (None, [MODEL], "that your token has write access (`hf auth login`, or HF_TOKEN)."),
        ("hf_old", [MODEL], "Invalid user token"),
        (OWNER_TOKEN, ["model"], "--push model: write OWNER/NAME"),
        (OWNER_TOKEN, ["a/b/c"], "--push a/b/c: "),
        ("", [MODEL], "Check that http://127.0.0.1:9 is the right hub (HF_ENDPOINT)"),
    ],
)
def test_an_invalid_push_is_rejected_before_anything_is_written(
    hub: FakeHub,
    policies_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
    words: list[str],
    message: str,
) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    elif token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a port without a server
    assert export_and_push(policies_run, tmp_path / "out", *words) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Error: ") and message in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not hub.commits


def test_private_requires_push(policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["export", str(policies_run.path), "--policy", "llm_1", "--out", str(tmp_path / "out"), "--private"]) == 2
    )
    assert "--private requires --push OWNER/NAME." in capsys.readouterr().err
