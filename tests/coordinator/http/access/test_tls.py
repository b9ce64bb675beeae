"""TLS: both kinds of requests, streams and WebSockets speak it, and a certificate that changes is
followed."""

from __future__ import annotations

import json
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.certificates import write_certificate
from support.http_fakes import ANSWER, FakeDispatcher
from support.websocket_client import connect

from splitserve.cli.config import ConfigError
from splitserve.cli.server_access import pinned, trust
from splitserve.coordinator.front_door import FrontDoor
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.access.tls import TlsFiles
from splitserve.coordinator.http.listening_server import admin_server
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

BODY = {"model": "tiny", "prompt": "Hi", "temperature": 0, "max_tokens": 1000}
KEY = "0123456789abcdef"


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(*write_certificate(tmp_path, "127.0.0.1", "localhost"))


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, files: TlsFiles
) -> AsyncIterator[HttpServer]:
    server = HttpServer(
        HttpApp(
            dispatcher, model, AppParts(front=FrontDoor(tls=files), operators=Operators(KEY), more_admin=[])
        )
    )
    await server.start()
    yield server
    await server.stop(grace_s=0)


@pytest.fixture
async def http(server: HttpServer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    url = f"https://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(
        base_url=url, verify=trust(url, tmp_path / "certificate.pem"), timeout=60
    ) as http:
        yield http


async def test_everything_speaks_tls(http: httpx.AsyncClient, server: HttpServer, tmp_path: Path) -> None:
    assert (await http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == ANSWER
    assert (await http.post("/v1/completions", json={**BODY, "stream": True})).text.endswith(
        "data: [DONE]\n\n"
    )
    assert (await http.post("/tokenize", json={"prompt": "Hi"})).status_code == 200
    async with connect(
        f"wss://127.0.0.1:{server.port}/v1/stream", ssl=pinned(tmp_path / "certificate.pem")
    ) as socket:
        await socket.send(json.dumps({"id": "a", "endpoint": "/v1/completions", "body": BODY}))
        assert json.loads(await socket.recv())["id"] == "a"


async def test_the_admin_port_does_too(server: HttpServer, files: TlsFiles, tmp_path: Path) -> None:
    admin = admin_server(server.app.admin, "127.0.0.1", 0, files)
    await admin.start()
    async with httpx.AsyncClient(verify=pinned(tmp_path / "certificate.pem"), timeout=60) as http:
        answer = await http.get(
            f"https://127.0.0.1:{admin.port}/debug/state", headers={"authorization": f"Bearer {KEY}"}
        )
    assert answer.status_code == 200
    await admin.stop()


async def test_plain_http_and_old_versions_are_refused(server: HttpServer, files: TlsFiles) -> None:
    async with httpx.AsyncClient(timeout=60, verify=False) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://127.0.0.1:{server.port}/health")
    assert files.context.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_certificate_that_changes_is_followed(
    server: HttpServer, files: TlsFiles, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_certificate(other, "localhost")
    shutil.copy(other / "key.pem", tmp_path / "key.pem")
    with pytest.raises(ValueError, match="private key"):  # they do not fit yet
        files.refresh()
    async with httpx.AsyncClient(verify=pinned(other / "certificate.pem"), timeout=60) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"https://127.0.0.1:{server.port}/health")
        shutil.copy(other / "certificate.pem", tmp_path / "certificate.pem")
        files.refresh()  # unless the server has, by itself
        assert (await http.get(f"https://127.0.0.1:{server.port}/health")).status_code == 200
    assert not files.refresh()


def test_files_that_are_no_good_are_refused_by_name(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "localhost")
    with pytest.raises(ValueError, match=r"none\.pem"):
        TlsFiles(tmp_path / "none.pem", key)
    with pytest.raises(ValueError, match=r"certificate\.pem: not a certificate in PEM with its private key"):
        TlsFiles(certificate, None)
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    TlsFiles(certificate, None)


def test_whom_commands_trust(tmp_path: Path) -> None:
    assert trust("http://127.0.0.1:1", None) is False
    system = trust("https://127.0.0.1:1", None)
    assert isinstance(system, ssl.SSLContext)
    assert system.check_hostname
    with pytest.raises(ConfigError, match="--tls-ca"):
        trust("https://127.0.0.1:1", tmp_path / "none")
    (tmp_path / "rubbish").write_text("x")
    with pytest.raises(ConfigError, match="PEM"):
        trust("https://127.0.0.1:1", tmp_path / "rubbish")
