"""Operators' pages open by the admin key or by a session that it opened, never by where a request comes
from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_fakes import ADMIN_KEY, OPERATOR, FakeDispatcher

from splitserve.coordinator.background import follow
from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.http.access.operators import (
    LOGIN,
    SESSION_S,
    TOKEN_S,
    Operators,
    admin_key,
    make_admin_key,
)
from splitserve.coordinator.server import AppParts, HttpApp
from splitserve.coordinator.text.served_model import ServedModel

FOR_OPERATORS = ("/metrics", "/debug/state", "/dashboard/feed", "/admin/flips")
FOR_EVERYONE = ("/health", "/ready", "/ping", "/version", "/openapi.json", "/", "/dashboard/app.js")


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def operators(clock: Clock) -> Operators:
    return Operators(ADMIN_KEY, clock)


@pytest.fixture
def app(dispatcher: FakeDispatcher, model: ServedModel, operators: Operators, tmp_path: Path) -> HttpApp:
    batches = BatchOptions(tmp_path / "batches")
    return HttpApp(
        dispatcher,
        model,
        AppParts(system=dispatcher.system, operators=operators, more_admin=[], batches=batches),
    )


@asynccontextmanager
async def visitor(app: object, url: str = "http://localhost") -> AsyncIterator[httpx.AsyncClient]:
    """From this host, as whatever is forwarded by a proxy."""
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url=url) as http:
        yield http


async def test_the_admin_port_asks_for_the_key_for_all_but_health(app: HttpApp) -> None:
    async with visitor(app.admin) as http:
        for path in (*FOR_OPERATORS, "/v1/models", "/v1/files", "/v1/batches"):
            assert (await http.get(path)).status_code == 401, path
            assert (await http.get(path, headers=OPERATOR)).status_code == 200, path
        for path in FOR_EVERYONE:
            assert (await http.get(path)).status_code == 200, path
        upload: dict[str, Any] = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
        assert (await http.post("/v1/files", **upload)).status_code == 401
        assert (await http.post("/v1/files", headers=OPERATOR, **upload)).status_code == 200
        assert (await http.post("/admin/drain/prefill-0")).status_code == 401
        assert (await http.post("/admin/drain/prefill-0", headers=OPERATOR)).status_code == 202
        assert (await http.get("/admin/none")).status_code == 404


async def test_no_other_spelling_of_a_path_opens_it(app: HttpApp) -> None:
    """Starlette's routes end with ``$``, which stands before a last newline, too."""
    for port in (app, app.admin):
        async with visitor(port) as http:
            for path in FOR_OPERATORS:
                for spelled in (
                    f"{path}%0a",
                    f"{path}%0a/",
                    f"{path}/",
                    f"{path}//",
                    f"{path}%2f",
                    f"/{path}",
                ):
                    status = (await http.get(f"http://localhost{spelled}")).status_code
                    assert status in (401, 404), (spelled, status)


async def test_the_http_port_asks_for_it_too(app: HttpApp) -> None:
    async with visitor(app) as http:
        for path in FOR_OPERATORS[:-1]:
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
            assert (await http.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
            assert (await http.get(path, headers=OPERATOR)).status_code == 200
        for path in (*FOR_EVERYONE, "/v1/models", "/v1/files"):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/chat/completions", "/admin/flips"):  # the latter is at the admin port
            assert (await http.get(path)).status_code == 404, path


async def test_an_odd_path_is_told_of_no_missing_option(
    app: HttpApp, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    for inner, reported in (
        (app, "There is no GET /v1/files/a/b; /docs lists what there is."),
        (HttpApp(dispatcher, model), "without --batch-file"),
    ):
        async with visitor(inner) as http:
            answer = await http.get("/v1/files/a/b")
            assert answer.status_code == 404
            assert reported in answer.json()["error"]["message"]


async def test_without_a_key_nobody_is_an_operator(dispatcher: FakeDispatcher, model: ServedModel) -> None:
    async with visitor(HttpApp(dispatcher, model)) as http:
        assert (await http.get("/metrics")).status_code == 401


async def test_a_session_looks_and_changes_nothing(app: HttpApp, clock: Clock) -> None:
    async with visitor(app.admin) as http:
        assert (await http.post(LOGIN, json={"key": "wrong" * 5})).status_code == 401
        assert not http.cookies
        answer = await http.post(LOGIN, json={"key": ADMIN_KEY})
        cookie = answer.headers["set-cookie"].lower()
        assert answer.status_code == 204
        assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/"))
        assert "secure" not in cookie
        assert ADMIN_KEY not in cookie
        for path in FOR_OPERATORS:
            assert (await http.get(path)).status_code == 200, path
        assert (await http.post("/admin/drain/prefill-0")).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer wrong"})).status_code == 401
        clock.now += SESSION_S
        assert (await http.get("/metrics")).status_code == 401
    async with visitor(app.admin, "https://localhost") as http:
        assert "secure" in (await http.post(LOGIN, json={"key": ADMIN_KEY})).headers["set-cookie"].lower()


async def test_a_session_is_no_other_keys_and_cannot_be_made_up(
    app: HttpApp, dispatcher: FakeDispatcher, model: ServedModel, clock: Clock
) -> None:
    async with visitor(app) as http:
        await http.post(LOGIN, json={"key": ADMIN_KEY})
        ((name, session),) = http.cookies.items()
    other = HttpApp(dispatcher, model, AppParts(operators=Operators("other" * 8, clock)))
    late = f"{clock.now + 2 * SESSION_S:.0f}.{session.rpartition('.')[2]}"
    for server, value, status in (
        (app, session, 200),
        (other, session, 401),
        (app, late, 401),
        (app, "", 401),
        (app, "9e9.ü", 401),
    ):
        async with visitor(server) as http:
            answer = await http.get("/metrics", headers={"cookie": f"{name}={value}".encode()})
            assert answer.status_code == status, value


async def test_a_link_opens_one_session_for_an_hour(app: HttpApp, operators: Operators, clock: Clock) -> None:
    link, late = (f"{LOGIN}?token={operators.token()}" for _ in range(2))
    for status, leads_to in ((200, "../"), (401, "../#link-used")):
        async with visitor(app) as http:
            answer = await http.get(link)
            assert (answer.status_code, answer.headers["location"]) == (303, leads_to)
            assert (await http.get("/metrics")).status_code == status
    clock.now += TOKEN_S
    async with visitor(app) as http:
        assert not (await http.get(late)).cookies
        session = operators._sign("session", f"{clock.now + 99:.0f}")  # of another kind
        assert not (await http.get(f"{LOGIN}?token={session}")).cookies


async def test_a_new_key_in_the_file_counts_and_ends_sessions(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make_admin_key(tmp_path / "admin.key")
    old = admin_key(file)
    operators = Operators(old, file=file)
    async with (
        asyncio.timeout(30),
        asyncio.TaskGroup() as group,
        visitor(HttpApp(dispatcher, model, AppParts(operators=operators))) as http,
    ):
        follower = group.create_task(follow("admin key", operators.refresh, every_s=0.01))

        async def status(key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await http.get("/debug/state", headers=headers)).status_code

        await http.post(LOGIN, json={"key": old})
        assert await status(None) == 200
        file.write_text("short")
        while "still going by the old admin key" not in caplog.text:
            await asyncio.sleep(0.01)
        assert await status(old) == 200
        new = admin_key(make_admin_key(file))
        while await status(new) != 200:
            await asyncio.sleep(0.01)
        assert await status(old) == 401
        assert await status(None) == 401
        follower.cancel()
    assert caplog.text.count("still going by the old admin key") == 1


async def test_no_web_page_changes_anything(app: HttpApp) -> None:
    async with visitor(app.admin) as http:
        headers = {**OPERATOR, "origin": "http://evil.example"}
        assert (await http.post("/admin/drain/prefill-0", headers=headers)).status_code == 403
        assert (await http.post("/v1/files", headers=headers)).status_code == 403


def test_the_key_file(tmp_path: Path) -> None:
    path = make_admin_key(tmp_path / "key")
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(admin_key(path)) == 64
    path.chmod(0o640)
    with pytest.raises(OSError, match=rf"open to other users \(mode 0640\); run: chmod 600 {path}"):
        admin_key(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ValueError, match="at least 16"):
        admin_key(path)
