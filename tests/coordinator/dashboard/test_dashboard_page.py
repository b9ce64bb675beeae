"""The dashboard as a person meets it: in a real browser, by keyboard."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.browser import CHROMIUM, browser
from support.http_fakes import ADMIN_KEY, ANSWER, FakeDispatcher

from splitserve.coordinator.http.access.operators import LOGIN, Operators
from splitserve.coordinator.lifecycle.time_ledger import TimeLedger
from splitserve.coordinator.metrics.objectives import Objectives
from splitserve.coordinator.metrics.request_record import RequestRecord
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot, WorkerSnapshot
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

HOSTILE = "<img src=x onerror=document.title='taken'>"
STEERING = {
    "mode": "advise",
    "state": "7P:1D is the best ratio",
    "load": {"prefill": 1.25, "decode": 0.5},
    "decisions": [{"ago_s": 4.0, "kind": "flip", "worker": "worker-3", "role": "prefill", "reason": HOSTILE}],
    "wanted_workers": {"prefill": 7, "decode": 1},
    "counts": {"flip": 1},
}
COPIED = (
    "window.copied = ''; Object.defineProperty(navigator, 'clipboard', {value: {writeText: async "
    "(text) => { copied = text; }}})"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


def system() -> SystemSnapshot:
    prefill = WorkerSnapshot("prefill-0", "prefill", 100, 90, 10, 0, 0, 0, 0, 0, 5, adapters=["sql", HOSTILE])
    return SystemSnapshot(
        ready=True,
        steering=STEERING,
        workers=[prefill, WorkerSnapshot(HOSTILE, "decode", 100, 50, 20, 30, 0, 2, 0, 0, 5)],
    )


async def test_by_keyboard(dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path) -> None:
    operators = Operators(ADMIN_KEY)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(system=system, operators=operators)))
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with browser(tmp_path) as page, httpx.AsyncClient(base_url=url, timeout=60) as http:
        await page.open(f"{url}{LOGIN}?token={operators.token()}")
        await page.until("document.querySelector('#status').dataset.state === 'ready'")
        assert await page.text("#model") == "tiny"
        assert "curl" in await page.text("#gantt")  # an empty list shows the next step
        assert HOSTILE in await page.text("#flow")  # a worker's name is text
        assert "2 adapters" in await page.text("#flow")
        assert await page.value("document.querySelector('#flow [title^=sql]').title") == f"sql, {HOSTILE}"
        reported = await page.text("#steering")
        assert all(
            words in reported for words in ("advise", "125%", "7P:1D is the best ratio", "worker-3", HOSTILE)
        )

        await page.press("Tab")
        assert await page.value("document.activeElement.className") == "skip"
        await page.press("t")
        assert await page.value("document.documentElement.dataset.theme") == "light"
        await page.press("t")
        dark = await page.value("getComputedStyle(document.body).backgroundColor")
        await page.press("t")
        assert (
            await page.value("getComputedStyle(document.body).backgroundColor") != dark
        )  # the user prefers light

        await page.press("p")
        await page.write("Hi <b>there</b>")
        await page.value("document.querySelector('#chat-temperature').value = 0")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.turn .stagebar').length === 1")
        assert (await page.value("document.querySelector('.turn:last-child span').textContent")) == ANSWER
        assert await page.text(".turn.user") == "Hi <b>there</b>"
        assert "decode" in await page.text(".turn .facts")
        assert "prompt tokens, 3 of them cached" in await page.text(".turn .facts:last-child")

        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})).status_code == 200
        await page.until("document.querySelectorAll('#gantt [role=row][id]').length === 2")
        await page.press("Escape")
        await page.value("document.querySelector('#gantt').focus()")
        await page.press("ArrowDown")
        await page.press("ArrowDown")
        assert await page.value("document.querySelector('#gantt [aria-selected=true]').id") == "request-1"
        assert "chatcmpl-" in await page.text("#gantt-detail code")
        await page.value(COPIED)
        await page.press("c")
        await page.until("copied && document.querySelector('#gantt-detail button').textContent === 'Copied'")
        assert await page.value("copied") == await page.text("#gantt-detail code")
        assert await page.value("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"

        server.app.dashboard.views["tiny"].sample(
            server.app.dashboard.views["tiny"]._sampled_at + 2, system()
        )
        await page.until("/median; p95 [0-9]/.test(document.querySelectorAll('.tile')[3].innerText)")
        await page.until(
            "/Too few requests to tell: 2 answered in the last "
            "minute/.test(document.querySelector('#verdict').innerText)"
        )
        await page.value("document.querySelector('.plot').focus()")
        await page.press("Home")
        assert " at " in await page.value("document.querySelector('.plot').getAttribute('aria-label')")

        await page.look(390, 844, "dark")
        await page.until("document.documentElement.scrollWidth <= 390")  # charts follow their panel
        assert await page.value("document.querySelector('#gantt .copy').offsetWidth") > 0
        assert await page.value("document.title") == "splitserve"
        assert page.problems == []
        await server.stop(grace_s=0)
        await page.until("/No answer from the coordinator/.test(document.querySelector('#notice').innerText)")
        assert await page.text("#status") == "no answer"


async def test_the_admin_key_opens_the_page_for_this_browser(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    server = HttpServer(HttpApp(dispatcher, model, AppParts(system=system, operators=Operators(ADMIN_KEY))))
    await server.start()
    async with browser(tmp_path) as page:
        await page.open(f"http://127.0.0.1:{server.port}")
        await page.until("!document.querySelector('#unlock').hidden")
        assert await page.value("document.querySelector('#notice').hidden")  # the form is enough
        for key, seen in (("wrong", "'not the admin key'"), (ADMIN_KEY, "'ready'")):
            await page.value("document.querySelector('#admin-key').focus()")
            await page.write(key)
            await page.press("Enter")
            await page.until(f"document.body.innerText.includes({seen})")
            if key == "wrong":  # the next look at the feed, a second later, must not wipe it out
                await page.value("window.asked = performance.getEntriesByType('resource').length")
                await page.until("performance.getEntriesByType('resource').length > window.asked + 1")
                assert "not the admin key" in await page.text("#notice")
        assert await page.value("document.querySelector('#unlock').hidden")
        assert await page.value("document.cookie") == ""  # no script can read it
        await page.value("window.before = location.reload()")
        await page.until(
            "!('before' in window) && document.querySelector('#status')?.dataset.state === 'ready'"
        )
    await server.stop(grace_s=0)


async def test_a_link_that_has_been_used_says_so(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    operators = Operators(ADMIN_KEY)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(system=system, operators=operators)))
    await server.start()
    link = f"http://127.0.0.1:{server.port}{LOGIN}?token={operators.token()}"
    async with httpx.AsyncClient() as other:
        assert (await other.get(link)).status_code == 303
    async with browser(tmp_path) as page:
        await page.open(link)
        await page.until("!document.querySelector('#unlock').hidden")
        assert "This link opens the dashboard once" in await page.text("#notice")
    await server.stop(grace_s=0)


def crowd(role: str) -> list[WorkerSnapshot]:
    return [
        WorkerSnapshot(f"{role}-{i}", role, 100, 50, 20, 30, 0, 2, 0, 0, 5, busy=i / 64) for i in range(64)
    ]


def waited(number: int, end: float) -> RequestRecord:
    """A request that queued for most of its time."""
    ledger = TimeLedger("parse", end - 4.0)
    for stage, took in (("queue", 0.01), ("prefill", 2.6), ("decode", 3.0)):
        ledger.enter(stage, end - 4.0 + took)  # type: ignore[arg-type]
    ledger.close(end)
    return RequestRecord(
        f"cmpl-{number}",
        "/v1/completions",
        "200",
        ledger,
        ledger.stages(),
        end - 1.0,
        100,
        0,
        9,
        1,
        f"prefill-{number % 64}",
        "decode-1",
    )


async def test_it_tells_what_is_in_the_way_and_shows_many_workers(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    """64 workers a role, a queue, objectives, a worker that is lost, refusals: by keyboard, and on a
    phone."""
    busy = [worker._replace(busy=0.95) for worker in crowd("prefill")]
    snapshot = SystemSnapshot(ready=True, workers=[*busy, *crowd("decode")])
    operators = Operators(ADMIN_KEY)
    bound = Objectives(ttft_s=1.0)
    app = HttpApp(
        dispatcher,
        model,
        AppParts(system=lambda: snapshot, operators=operators, price_per_hour=2.0, objectives=bound),
    )
    server = HttpServer(app)
    await server.start()
    view = app.dashboard.views["tiny"]
    now = view._sampled_at
    view.sample(
        now + 2,
        SystemSnapshot(
            ready=True,
            workers=[*snapshot.workers, WorkerSnapshot(HOSTILE, "decode", 1, 1, 0, 0, 0, 0, 0, 0, 0)],
        ),
    )
    for number in range(40):
        view.note(waited(number, now + 3.0))
    app.metrics.request_ended("/v1/completions", "429")
    view.sample(now + 4, snapshot)
    async with browser(tmp_path) as page:
        await page.open(f"http://127.0.0.1:{server.port}{LOGIN}?token={operators.token()}")
        await page.until("document.querySelector('#verdict').dataset.level === 'bad'")
        reported = await page.text("#verdict")
        assert "queueing for prefill, whose workers are busy 95% of the time" in reported
        assert "One more prefill worker would" in reported
        assert HOSTILE in reported  # lost; a name is text
        assert "Slow" not in await page.text("#announce")
        events = await page.text("#events")
        assert f"{HOSTILE} lost" in events
        assert "1 request refused (429)" in events
        assert "queue 65%" in await page.text("#time-bar")
        assert "kept by 0%" in await page.text("#slo-state")
        assert "0%" in await page.value("document.querySelectorAll('.tile')[5].innerText")
        assert await page.value("document.querySelectorAll('.cells [role=option]').length") == 128
        assert await page.value("document.querySelector('#tenants').hidden") is True

        await page.value("document.querySelector('.cells.prefill').focus()")
        for key in ("Home", "ArrowRight", "ArrowRight"):
            await page.press(key)
        assert "prefill-2" in await page.text(".strip .about")
        await page.value("window.cell = document.querySelector('.cells').firstElementChild; null")
        await page.until("!cell.isConnected")  # drawn anew: focus and choice stay
        assert await page.value("document.activeElement.classList.contains('cells')")
        assert "prefill-2" in await page.text(".strip .about")

        await page.value("document.querySelector('#slo').closest('details').open = true")
        await page.value("document.querySelector('#slo-ttft').focus()")
        await page.write("30")
        await page.press("Enter")
        await page.until(
            "/yours.*30.00 s.*kept by 98%/.test(document.querySelector('#slo-state').innerText)"
        )  # of 40, and one refused

        await page.look(390, 844, "light")
        await page.until("document.documentElement.scrollWidth <= 390")
        assert page.problems == []
        await server.stop(grace_s=0)
