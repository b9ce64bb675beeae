"""Every answer can be found in the log, by the id in its ``x-request-id``."""

from __future__ import annotations

import logging

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.server import HttpServer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_is_a_line_in_the_log(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.fail_after = (4, Ended(error="failed", message="all attempts used up"))
    with caplog.at_level(logging.WARNING):
        response = await http.post("/v1/completions", json={"prompt": "quick", "stream": stream})
    (line,) = caplog.records
    named = response.headers["x-request-id"]
    assert line.getMessage() == f"{named} ends with 500: all attempts used up"
    assert line.__dict__["fields"] == {"request_id": named, "status": "500", "tenant": ""}


async def test_what_is_refused_has_an_id_and_is_no_line(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answers = [
            await http.post("/v1/completions", json={"prompt": "quick", "n": 0}),
            await http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}),
            await http.get("/v1/chat/completions"),
            await http.post("/v1/chat/completions", json={"messages": []}),
        ]
    assert [answer.status_code for answer in answers] == [400, 400, 405, 400]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4
    assert caplog.records == []


async def test_an_error_of_ours_names_the_id_under_which_the_log_has_it(
    http: httpx.AsyncClient,
    server: HttpServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.app.generation, "_open", broken)
    response = await http.post("/v1/completions", json={"prompt": "quick"})
    (line,) = caplog.records
    assert response.status_code == 500
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert line.__dict__["fields"] == {"request_id": response.headers["x-request-id"]}
    assert "a bug" in str(line.exc_info)
