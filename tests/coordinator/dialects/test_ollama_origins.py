"""Ollama's API without a content type, as curl sends it: for programs, and for no other site's page."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import orjson
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hi!"}]}


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, limits: HttpLimits
) -> AsyncIterator[HttpServer]:
    server = HttpServer(HttpApp(dispatcher, model, AppParts(limits, dispatcher.system, ollama=True)))
    await server.start()
    yield server
    await server.stop(grace_s=0)


KINDS = [None, "text/plain", "application/x-www-form-urlencoded"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["chat", "generate", "show"])
async def test_curl_needs_no_content_type(http: httpx.AsyncClient, path: str, kind: str | None) -> None:
    """The examples of Ollama's own documents send none but curl's, a form's."""
    body = orjson.dumps({**ASKED, "prompt": "Hi!"})
    headers = {} if kind is None else {"content-type": kind}
    assert (await http.post(f"/api/{path}", content=body, headers=headers)).status_code == 200
    own = {**headers, "origin": str(http.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
    assert (await http.post(f"/api/{path}", content=body, headers=own)).status_code == 200


@pytest.mark.parametrize("kind", [*KINDS, "multipart/form-data"])
@pytest.mark.parametrize(
    "sent",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_a_form_of_another_site_is_refused(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, sent: dict[str, str], kind: str | None
) -> None:
    headers = {**sent, **({} if kind is None else {"content-type": kind})}
    for path in ("chat", "generate", "show"):
        answer = await http.post(f"/api/{path}", content=orjson.dumps(ASKED), headers=headers)
        assert (answer.status_code, list(answer.json())) == (403, ["error"])
    assert not dispatcher.requests


async def test_the_openapi_document_has_its_paths(server: HttpServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
        for path in ("/api/chat", "/api/generate", "/api/show", "/api/tags", "/api/ps", "/api/version"):
            for method in paths[path]:
                assert (await http.request(method, path)).status_code not in (404, 405), path
