"""The dashboard of a coordinator with two models: its address names one, a link leads to the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
from coordinator.conftest import ADMIN_KEY
from support.browser import browser
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.http.access.operators import LOGIN, Operators
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.serving import Served
from splitserve.coordinator.text.served_model import ServedModel


async def test_each_model_has_its_page(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    other = FakeDispatcher(dispatcher.script)
    operators = Operators(ADMIN_KEY)
    further = [Served(replace(model, name="org/b&w", aliases=()), other, other.system)]
    parts = AppParts(system=dispatcher.system, operators=operators, further=further)
    server = HttpServer(HttpApp(dispatcher, model, parts))
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with browser(tmp_path) as page, httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"model": "org/b&w", "prompt": "x", "max_tokens": 3}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        await page.open(f"{url}{LOGIN}?token={operators.token()}")
        await page.until("document.querySelector('#model b') !== null")
        assert await page.text("#model b") == "tiny"
        assert await page.text("#model a") == "org/b&w"
        await page.value("document.querySelector('#model a').click()")
        await page.until("document.querySelector('#model b')?.innerText === 'org/b&w'")
        await page.until("document.querySelectorAll('#gantt [role=row][id]').length === 1")
        await page.press("p")
        await page.write("Hi")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.turn .stagebar').length === 1")
        assert page.problems == []
    await server.stop(grace_s=0)
    assert (len(dispatcher.requests), len(other.requests)) == (0, 2)
