"""``--model`` takes a folder, a model of the hub, or s3://: each becomes a folder, and where it cannot the
sentence names the remedy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from support.s3_server import s3_server

from splitserve.cli.config import ConfigError
from splitserve.cli.model_source import HUB_ID, resolved, with_folder
from splitserve.cli.settings import DEMO_MODEL, ServerSettings
from splitserve.engine.model.model_folder import check_model_folder

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {file.name: file.read_bytes() for file in DEMO_MODEL.iterdir() if file.is_file()}
RESOLVE = """
import sys
from splitserve.cli.config import ConfigError
from splitserve.cli.model_source import resolved
try:
    print(resolved(sys.argv[1], sys.argv[2], weights=sys.argv[3] == "weights"))
except ConfigError as error:
    print("refused:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """The few calls of a hub that fetch a model ``ours/tiny`` with the branch main and the tag v1."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = unquote(urlsplit(self.path).path)
        if not path.startswith(("/api/models/ours/", "/ours/")):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/ours/gated"):
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if "/revision/" in path and path.rpartition("/")[2] not in ("main", "v1", SHA):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": self.oid(data)}
                for name, data in self.files().items()
            ]
            return self.answer(200, json.dumps(entries).encode())
        if path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.files()]
            return self.answer(
                200, json.dumps({"id": "ours/tiny", "sha": SHA, "siblings": siblings}).encode()
            )
        data = self.files()[path.rpartition("/")[2]]
        return self.answer(200, data, {"ETag": f'"{self.oid(data)}"', "X-Repo-Commit": SHA})

    do_HEAD = do_GET

    def files(self) -> dict[str, bytes]:
        return {**FILES, "pytorch_model.bin": b"pickle", "README.md": b"hello"}

    def oid(self, data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resolve(model: str, home: Path, endpoint: str, revision: str = "", weights: bool = True) -> str:
    """In a process of its own: the hub's library reads its variables once."""
    env = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    argv = [sys.executable, "-c", RESOLVE, model, revision, "weights" if weights else ""]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=100, check=True, env=env
    ).stdout.strip()


def test_a_model_of_the_hub_is_fetched_once_and_then_served_from_the_cache(hub: str, tmp_path: Path) -> None:
    folder = Path(resolve("ours/tiny", tmp_path, hub))
    assert folder.name == SHA
    assert check_model_folder(folder).num_layers == 5
    assert not list(folder.glob("*.bin"))  # never fetched
    assert not (folder / "README.md").exists()
    assert resolve("ours/tiny", tmp_path, "http://127.0.0.1:9") == str(folder)  # nobody listens there
    assert resolve("ours/tiny", tmp_path, hub, revision="v1") == str(folder)
    assert any("/revision/v1" in path for path in Hub.asked)


def test_a_coordinator_fetches_no_weights(hub: str, tmp_path: Path) -> None:
    folder = Path(resolve("ours/tiny", tmp_path, hub, weights=False))
    assert (folder / "tokenizer.json").exists()
    assert not list(folder.glob("*.safetensors"))
    assert check_model_folder(folder, "if there").num_layers == 5


def test_what_the_hub_has_not_is_said_with_what_to_do(hub: str, tmp_path: Path) -> None:
    message = resolve("theirs/none", tmp_path, hub)
    assert message == (
        "refused: --model theirs/none: there is neither such a folder nor such a model on the hub "
        "(or it is private: set HF_TOKEN)"
    )
    assert "it is gated: accept its licence on the hub, then set HF_TOKEN" in resolve(
        "ours/gated", tmp_path, hub
    )
    assert "it has no revision v9; --revision is a branch, a tag or a commit" in resolve(
        "ours/tiny", tmp_path, hub, revision="v9"
    )
    message = resolve("ours/tiny", tmp_path, "http://127.0.0.1:9")
    assert "the hub cannot be reached" in message
    assert f"and {tmp_path} has no copy; run `hf download ours/tiny`" in message


def test_what_another_program_has_cached_is_found_offline(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--ours--tiny" / "snapshots" / SHA
    shutil.copytree(DEMO_MODEL, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(SHA)
    assert resolve("ours/tiny", tmp_path, "http://127.0.0.1:9") == str(snapshot)
    assert resolve("ours/tiny", tmp_path, "http://127.0.0.1:9", revision=SHA) == str(snapshot)


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours" / "tiny").mkdir(parents=True)
    assert resolved("ours/tiny") == Path("ours/tiny")
    assert resolved("/no/such/folder") == Path("/no/such/folder")  # it is checked later
    with pytest.raises(ConfigError, match="--revision v1: ours/tiny is a folder"):
        resolved("ours/tiny", "v1")
    assert not HUB_ID.fullmatch("../x")
    assert not HUB_ID.fullmatch("a/b/c")


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_server(monkeypatch, "models") as client:
        yield client


def test_a_model_in_s3_is_fetched_once_and_again_when_it_has_changed(s3: Any, tmp_path: Path) -> None:
    for name, data in {**FILES, "pytorch_model.bin": b"pickle", "sub/config.json": b"{}"}.items():
        s3.put_object(Bucket="models", Key=f"team/tiny/{name}", Body=data)
    settings = ServerSettings(model=Path("s3://models/team/tiny"), insecure=True)  # a Path has one slash less
    with_texts = with_folder(settings, weights=False)
    assert with_texts.model_name == "tiny"
    assert not list(with_texts.model.glob("*.safetensors"))
    folder = resolved("s3://models/team/tiny/")
    assert check_model_folder(folder).num_layers == 5
    assert not list(folder.glob("*.bin"))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolved("s3://models/team/tiny") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    s3.put_object(Bucket="models", Key="team/tiny/generation_config.json", Body=b'{"temperature": 0.5}')
    assert resolved("s3://models/team/tiny") != folder
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.mark.parametrize("url", ["s3://x/y", "https://huggingface.co/Qwen/Qwen3-0.6B"])
def test_a_url_that_names_no_model_is_told_as_it_was_given(url: str) -> None:
    for given in (url, str(Path(url))):  # settings have it as a Path, with one slash less
        with pytest.raises(ConfigError, match=rf"^--model {url}: of URLs only s3://BUCKET/PREFIX is taken"):
            resolved(given)


def test_what_s3_has_not_is_said_with_what_to_do(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"s3://models/nothing: there is no config.json.*name their folder"):
        resolved("s3://models/nothing")
    with pytest.raises(ConfigError, match=r"s3://other/x: .*NoSuchBucket.*check the name, AWS_PROFILE"):
        resolved("s3://other/x")
    with pytest.raises(ConfigError, match="--revision v1: s3://models/x has none"):
        resolved("s3://models/x", "v1")
    s3.put_object(Bucket="models", Key="big/config.json", Body=b"{}")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1, used=1, free=0))
    with pytest.raises(ConfigError, match="make room or set XDG_CACHE_HOME"):
        resolved("s3://models/big")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        ConfigError, match=r"needs boto3, which is not installed: pip install 'splitserve\[s3\]'"
    ):
        resolved("s3://models/big")
