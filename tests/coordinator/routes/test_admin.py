"""Operators' calls about workers. Their keys: ``http/access/test_operators.py``."""

from __future__ import annotations

import httpx
from starlette.applications import Starlette
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.routes.admin import AdminRoutes
from splitserve.coordinator.routes.routes import error_handlers


async def post(path: str) -> tuple[httpx.Response, FakeDispatcher]:
    dispatcher = FakeDispatcher(lambda request: [])
    app = Starlette(routes=AdminRoutes({"tiny": dispatcher}).routes(), exception_handlers=error_handlers())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        return await http.post(path), dispatcher


async def test_a_worker_is_drained() -> None:
    answer, dispatcher = await post("/admin/drain/prefill-0?timeout_s=2.5")
    assert (answer.status_code, answer.json()["draining"]) == (202, True)
    assert dispatcher.drained == [("prefill-0", 2.5)]


async def test_a_worker_changes_its_role_or_it_is_said_why_not() -> None:
    answer, _ = await post("/admin/flip/worker-0?to=decode")
    assert (answer.status_code, answer.json()["role"]) == (202, "decode")
    for path, status, message in (
        ("/admin/flip/worker-0?to=cook", 400, "prefill, decode"),
        ("/admin/flip/prefill-0?to=decode", 400, "cannot change its role"),
        ("/admin/flip/nobody?to=decode", 404, "prefill-0"),
    ):
        answer, _ = await post(path)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), (
            answer.text
        )


async def test_what_is_wrong_is_said() -> None:
    unknown, _ = await post("/admin/drain/nobody")
    assert unknown.status_code == 404
    assert "prefill-0" in unknown.json()["error"]["message"]
    late, _ = await post("/admin/drain/prefill-0?timeout_s=soon")
    assert (late.status_code, late.json()["error"]["param"]) == (400, "timeout_s")
