"""Who may have a worker drained, and who not."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.admin import AdminRoutes, admin_key
from splitserve.coordinator.routes import error_handlers

KEY = "0123456789abcdef"


async def post(key: str | None, path: str, client: str = "127.0.0.1", **headers: str) -> tuple[httpx.Response, FakeDispatcher]:
    dispatcher = FakeDispatcher(lambda request: [])
    app = Starlette(routes=AdminRoutes(dispatcher, key).routes(), exception_handlers=error_handlers())
    transport = httpx.ASGITransport(app, client=(client, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.post(path, headers=headers), dispatcher


async def test_a_worker_is_drained() -> None:
    answer, dispatcher = await post(None, "/admin/drain/prefill-0?timeout_s=2.5")
    assert (answer.status_code, answer.json()["draining"]) == (202, True)
    assert dispatcher.drained == [("prefill-0", 2.5)]


@pytest.mark.parametrize(
    ("key", "client", "headers", "status"),
    [
        (None, "::1", {}, 202),
        (None, "10.1.2.3", {}, 403),
        (None, "127.0.0.1", {"origin": "http://evil.example"}, 403),
        (KEY, "127.0.0.1", {}, 401),
        (KEY, "10.1.2.3", {"authorization": "Bearer wrong"}, 401),
        (KEY, "10.1.2.3", {"authorization": f"Bearer {KEY}"}, 202),
        (KEY, "10.1.2.3", {"authorization": f"Bearer {KEY}", "origin": "http://evil.example"}, 403),
    ],
)
async def test_who_may(key: str | None, client: str, headers: dict[str, str], status: int) -> None:
    answer, dispatcher = await post(key, "/admin/drain/prefill-0", client, **headers)
    assert answer.status_code == status, answer.text
    assert bool(dispatcher.drained) == (status == 202)
    assert status == 202 or set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_worker_changes_its_role_or_it_is_said_why_not() -> None:
    answer, _ = await post(None, "/admin/flip/worker-0?to=decode")
    assert (answer.status_code, answer.json()["role"]) == (202, "decode")
    for path, status, said in (
        ("/admin/flip/worker-0?to=cook", 400, "prefill, decode"),
        ("/admin/flip/prefill-0?to=decode", 400, "cannot change its role"),
        ("/admin/flip/nobody?to=decode", 404, "prefill-0"),
    ):
        answer, _ = await post(None, path)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


async def test_what_is_wrong_is_said() -> None:
    unknown, _ = await post(None, "/admin/drain/nobody")
    assert unknown.status_code == 404
    assert "prefill-0" in unknown.json()["error"]["message"]
    late, _ = await post(None, "/admin/drain/prefill-0?timeout_s=soon")
    assert (late.status_code, late.json()["error"]["param"]) == (400, "timeout_s")


def test_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    assert admin_key(path) == KEY
    assert admin_key(None) is None
    path.write_text("short")
    with pytest.raises(ValueError, match="at least 16"):
        admin_key(path)
