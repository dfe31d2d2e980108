"""`cory export --push` to a hub of this process: a server that speaks what is needed of the real one's interface."""

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

OWNER, GUEST = "hf_owner", "hf_guest"
"""Tokens that the hub knows; the second may read only."""
MODEL = "me/model"


class Hub(ThreadingHTTPServer):
    """Keeps one model."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.private: bool | None = None
        """None: the model does not exist."""
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by their checksum, which a commit names."""
        self.commits: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def print(self, found: object, status: int = 200) -> None:
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.path == "/api/whoami-v2":
            if token in (OWNER, GUEST):
                self.print({"name": "me", "type": "user"})
            else:
                self.print({"error": "Invalid user token."}, 401)
        elif self.path == f"/api/models/{MODEL}" and self.server.private is not None:
            self.print({"id": MODEL, "private": self.server.private})
        else:
            self.print({"error": f"Not found: {self.path}"}, 404)

    def do_PUT(self) -> None:
        self.server.stored[self.path.rpartition("/")[2]] = self.body()
        self.print({})

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        if self.path == "/api/validate-yaml":
            self.print({"errors": [], "warnings": []})
        elif OWNER not in self.headers.get("Authorization", ""):
            self.print({"error": "You don't have the rights to do this"}, 403)
        elif self.path == "/api/repos/create":
            exists = hub.private is not None
            hub.private = hub.private if exists else json.loads(body).get("visibility") == "private"
            self.print({"url": f"{hub.address}/{MODEL}", "error": "exists"}, 409 if exists else 200)
        elif self.path == f"/api/models/{MODEL}/preupload/main":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {True: "lfs", False: "regular"}
            said = [{"path": p, "uploadMode": modes[p.endswith("s")], "shouldIgnore": False} for p in paths]
            self.print({"files": said})
        elif self.path == f"/{MODEL}.git/info/lfs/objects/batch":
            asked = json.loads(body)["objects"]
            upload = [{**each, "actions": {"upload": {"href": f"{hub.address}/lfs/{each['oid']}"}}} for each in asked]
            self.print({"transfer": "basic", "objects": upload})
        elif self.path == f"/api/models/{MODEL}/commit/main":
            self.commit([json.loads(line) for line in body.splitlines()])
            self.print({"commitUrl": f"{hub.address}/{MODEL}/commit/a1", "commitOid": "a1", "success": True})
        else:
            self.print({"error": f"Not found: {self.path}"}, 404)

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
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that this process takes for the real one, with its owner's token set."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another protocol for large files, over their cloud
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", OWNER)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_gets_the_folder_that_was_written_with_its_card_in_one_commit(
    hub: Hub, policies_run: Run, tmp_path: Path, cory: Cory
) -> None:
    words = ["export", str(policies_run.path), "--policy", "llm_1", "--out", "out", "--push", MODEL, "--private"]
    environment = {"HF_ENDPOINT": hub.address, "HF_TOKEN": OWNER, "HF_HUB_DISABLE_XET": "1"}
    said = cory(*words, **environment)
    assert said.returncode == 0, said.stderr
    assert said.stdout == f"out: llm_1 after update 5, fp32, 17 MB.\n{hub.address}/{MODEL}\n"
    assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert {"README.md", "model.safetensors", "config.json"} <= set(hub.files)
    assert (hub.private, hub.commits) == (True, ["llm_1 after update 5, by cory-rllib"])


def exported(run: Run, out: Path, *words: str) -> int:
    return main(["export", str(run.path), "--policy", "llm_1", "--out", str(out), "--push", *(words or (MODEL,))])


def test_a_model_that_everybody_sees_gets_nothing_that_is_to_be_private(
    hub: Hub, policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.private = False
    assert exported(policies_run, tmp_path / "out", MODEL, "--private") == 2
    said = capsys.readouterr().err
    page = f"{hub.address}/{MODEL}"
    assert f"{page} exists, and everybody sees it. Make it private first. The model is in {tmp_path / 'out'}." in said
    assert not hub.files and (tmp_path / "out" / "README.md").exists()
    assert exported(policies_run, tmp_path / "again") == 0 and "README.md" in hub.files


def test_a_token_that_may_not_write_there_is_told_and_the_folder_stays(
    hub: Hub,
    policies_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", GUEST)
    assert exported(policies_run, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"--push {MODEL}: You don't have the rights to do this. The model is in {tmp_path / 'out'}." in said
    assert (tmp_path / "out" / "model.safetensors").exists() and hub.private is None and OWNER not in said


@pytest.mark.parametrize(
    ("token", "words", "what"),
    [
        (None, [MODEL], "may your token write there (`hf auth login`, or HF_TOKEN)?"),
        ("hf_old", [MODEL], "Invalid user token"),
        (OWNER, ["model"], "--push model: write OWNER/NAME"),
        (OWNER, ["a/b/c"], "--push a/b/c: "),
        ("", [MODEL], "Is http://127.0.0.1:9 the right hub (HF_ENDPOINT)"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    hub: Hub,
    policies_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
    words: list[str],
    what: str,
) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    elif token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    assert exported(policies_run, tmp_path / "out", *words) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Error: ") and what in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not hub.commits


def test_private_without_a_push_is_refused(
    policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["export", str(policies_run.path), "--policy", "llm_1", "--out", str(tmp_path / "out"), "--private"]) == 2
    )
    assert "--private requires --push OWNER/NAME." in capsys.readouterr().err
