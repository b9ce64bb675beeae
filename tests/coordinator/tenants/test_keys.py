"""Keys work for their tenant until they expire, and nothing keeps them in the clear."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.background import background
from splitserve.coordinator.errors import Unauthorized
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.listeners import ListenerFailures
from splitserve.coordinator.routes.tenants import tenant_routes
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.settings import CoordinatorSettings
from splitserve.coordinator.tenants.errors import TenantsFileError, Unknown
from splitserve.coordinator.tenants.opening import KeyDirectory, tenancy_of
from splitserve.coordinator.tenants.settings import TenantSettings
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.transport.process.private_files import write_private

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.sqlite"


@pytest.fixture
def store(path: Path) -> TenantStore:
    store = TenantStore(path, create=True)
    store.set_tenant("acme", tier="premium")
    return store


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_kept_as_a_hash_only(store: TenantStore, path: Path) -> None:
    made = store.create_key("acme")
    store.close()
    files = [file.read_bytes() for file in path.parent.iterdir()]
    assert files
    assert not any(
        made.key.encode() in content or made.key.removeprefix("sk-split-").encode() in content
        for content in files
    )
    assert path.stat().st_mode & 0o077 == 0


def test_what_a_key_opens(store: TenantStore, path: Path) -> None:
    key = store.create_key("acme", "ci", {"requests_per_minute": 5})
    store.set_tier("premium", None, {"tokens_per_minute": 100})
    account = KeyDirectory(path).account(f"Bearer {key.key}".encode())
    assert (account.tenant, account.key, account.priority_class) == ("acme", key.id, "premium")
    assert account.key_limits.requests_per_minute == 5
    assert account.tenant_limits.tokens_per_minute == 100
    assert len(account.salt) == 16


@pytest.mark.parametrize("header", [b"", b"Bearer ", b"Bearer sk-split-wrong", b"Basic abc", b"\xff\xfe"])
def test_what_opens_nothing(store: TenantStore, path: Path, header: bytes) -> None:
    store.create_key("acme")
    with pytest.raises(Unauthorized):
        KeyDirectory(path).account(header)


def test_an_end_that_passes_needs_no_reload(
    store: TenantStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = time.time() + 60
    key = store.create_key("acme", expires=end)
    directory = KeyDirectory(path)
    assert directory.account(f"Bearer {key.key}".encode()).tenant == "acme"
    monkeypatch.setattr(time, "time", lambda: end)
    with pytest.raises(Unauthorized):
        directory.account(f"Bearer {key.key}".encode())


def test_rotation_and_revocation(store: TenantStore, path: Path) -> None:
    old = store.create_key("acme", "ci", {"max_streams": 3})
    new = store.rotate_key(old.id, grace_s=60)
    directory = KeyDirectory(path)
    assert directory.account(f"Bearer {new.key}".encode()).key_limits.max_streams == 3
    assert directory.account(f"Bearer {old.key}".encode()).key == old.id
    store.revoke_key(old.id)
    store.revoke_key(new.id)
    directory = KeyDirectory(path)
    for key in (old, new):
        with pytest.raises(Unauthorized):
            directory.account(f"Bearer {key.key}".encode())
    with pytest.raises(Unknown, match="key_99"):
        store.revoke_key("key_99")


async def test_a_coordinator_notices_a_revoked_key(store: TenantStore, path: Path) -> None:
    key = store.create_key("acme")
    settings = TenantSettings(tenants_file=path)
    async with background() as spawn, tenancy_of(settings, ListenerFailures(), spawn) as tenancy:
        directory = tenancy.directory
        account = directory.account(f"Bearer {key.key}".encode())
        store.revoke_key(key.id)
        async with asyncio.timeout(60):
            while directory.account_of_key(account.key_id) is not None:
                await asyncio.sleep(0.005)


def test_a_file_that_is_none(path: Path) -> None:
    with pytest.raises(TenantsFileError, match="splitserve keys create"):
        KeyDirectory(path)
    write_private(path, "no database, but long enough to be taken for a file of some kind")
    with pytest.raises(TenantsFileError, match="cannot use"):
        KeyDirectory(path)


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"host": "0.0.0.0"}, "127.0.0.1"),
        ({"host": "::"}, "::1"),
        ({"host": "0.0.0.0", "open_access": True}, "0.0.0.0"),
        ({"host": "0.0.0.0", "tenants_file": "x"}, "0.0.0.0"),
        ({"host": "127.0.0.2"}, "127.0.0.2"),
        ({"host": "localhost"}, "localhost"),
    ],
)
def test_without_keys_only_this_host_is_served(more: dict[str, object], where: str) -> None:
    assert CoordinatorSettings.model_validate({"model": ".", "insecure": True, **more}).listen_host == where


async def test_the_server_asks_for_keys(
    store: TenantStore,
    path: Path,
    dispatcher: FakeDispatcher,
    model: ServedModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = store.create_key("acme").key
    caplog.set_level(logging.DEBUG)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(tenancy=Tenancy(KeyDirectory(path)))))
    await server.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60
    ) as http:
        for method, url in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("POST", "/v1/completions"),
        ):
            for headers in ({}, bearer("sk-split-wrong")):
                answer = await http.request(
                    method, url, headers=headers, json=CHAT if method == "POST" else None
                )
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["type"]) == (
                    401,
                    "invalid_api_key",
                    "authentication_error",
                ), url
                assert set(error) == {"message", "type", "param", "code"}
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
        assert (await http.post("/v1/chat/completions", headers=bearer(key), json=CHAT)).status_code == 200
    await server.stop(grace_s=0)
    (request,) = dispatcher.requests
    assert (request.tenant, request.priority_class, len(request.salt)) == ("acme", "premium", 16)
    assert key not in caplog.text


async def test_a_wrong_key_is_refused_before_its_body_is_sent(
    store: TenantStore, path: Path, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    server = HttpServer(HttpApp(dispatcher, model, AppParts(tenancy=Tenancy(KeyDirectory(path)))))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        b"application/json\r\ncontent-length: 100000\r\n\r\n{"
    )
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 401")
    writer.close()
    await server.stop(grace_s=0)


async def test_tenants_by_http(
    store: TenantStore, path: Path, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    operators = Operators("0123456789abcdef")
    app = HttpApp(
        dispatcher,
        model,
        AppParts(operators=operators, tenancy=Tenancy(KeyDirectory(path)), more_admin=tenant_routes(path)),
    )
    headers = bearer("0123456789abcdef")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app.admin), base_url="http://localhost"
    ) as http:
        assert (await http.get("/admin/keys")).status_code == 401
        assert (
            await http.put("/admin/tiers/gold", headers=headers, json={"tokens_per_day": 9})
        ).status_code == 200
        assert (
            await http.put("/admin/tenants/zed", headers=headers, json={"tier": "gold"})
        ).status_code == 200
        assert (
            await http.put("/admin/tenants/zed", headers=headers, json={"tier": "brass"})
        ).status_code == 404
        made = (await http.post("/admin/keys", headers=headers, json={"tenant": "zed", "name": "n"})).json()
        turned = (
            await http.post(f"/admin/keys/{made['id']}/rotate", headers=headers, json={"grace_s": 9})
        ).json()
        assert (await http.delete(f"/admin/keys/{made['id']}", headers=headers)).json() == {"done": True}
        wrong = await http.post("/admin/keys", headers=headers, json={"tenant": "zed", "max_streems": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_streems")
        listed = (await http.get("/admin/keys", headers=headers)).text
    assert made["key"] not in listed
    assert turned["id"] in listed
    assert next(iter(TenantStore(path).accounts(time.time()).values())).tenant_limits.tokens_per_day == 9


def test_the_tenants_file_is_private(path: Path) -> None:
    umask = os.umask(0)
    try:
        store = TenantStore(path, create=True)
        store.set_tenant("acme")
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
        store.close()
    finally:
        os.umask(umask)
    path.chmod(0o640)
    with pytest.raises(
        TenantsFileError,
        match=rf"the tenants file {path} is open to other users \(mode 0640\); run: chmod 600 {path}$",
    ):
        TenantStore(path)
