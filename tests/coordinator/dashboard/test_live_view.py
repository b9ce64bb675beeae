"""The recent past that the dashboard and ``splitserve top`` show."""

from __future__ import annotations

from typing import get_args

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.dashboard.live_view import NUM_POINTS, NUM_RECENT, LiveView
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.lifecycle.time_ledger import Stage, TimeLedger
from splitserve.coordinator.metrics.objectives import Objectives
from splitserve.coordinator.metrics.request_record import RequestRecord
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot, WorkerSnapshot
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants.limits import ANONYMOUS, Account
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text.served_model import ServedModel


def record(number: int, begin: float, step: float = 1.0, **more: object) -> RequestRecord:
    """A request that spent ``step`` seconds in each stage."""
    ledger = TimeLedger("parse", begin)
    for i, stage in enumerate(get_args(Stage)[1:], 1):
        ledger.enter(stage, begin + i * step)
    ledger.close(begin + len(get_args(Stage)) * step)
    fields: dict[str, object] = {
        "id": f"r{number}",
        "endpoint": "/v1/completions",
        "status": "200",
        "ledger": ledger,
        "stages": ledger.stages(),
        "first_token_at": begin + 3 * step,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 64,
        "num_output_tokens": 5,
        "num_dispatches": 1,
        "prefill_worker": "p",
        "decode_worker": "d",
    }
    return RequestRecord(**{**fields, **more})  # type: ignore[arg-type]


def worker(role: str, used: int, **counters: float) -> WorkerSnapshot:
    return WorkerSnapshot(f"{role}-0", role, 100, 100 - used, 0, used, 0, 1, 0, 0, 7, counters)


def test_of_many_adapters_of_a_worker_some_are_named() -> None:
    many = worker("decode", 30)._replace(adapters=[f"a{n}" for n in range(40)])
    (shown,) = LiveView(0.0, 0.0).state(1.0, SystemSnapshot(workers=[many]))["workers"]
    assert (shown["num_adapters"], shown["adapters"]) == (40, [f"a{n}" for n in range(16)])


def test_each_point_says_what_happened_since_the_one_before() -> None:
    answered = {("/v1/completions", "429", ""): 2}
    view = LiveView(100.0, wall=5000.0, answered=answered)
    system = SystemSnapshot(
        workers=[worker("decode", 30, output_tokens=10.0), worker("prefill", 5, prompt_tokens=7.0)],
        num_waiting=3,
    )
    view.sample(102.0, system)
    for number, step in enumerate((1.0, 2.0, 3.0)):
        view.note(record(number, 103.0, step))
    view.note(record(3, 103.0, status="429", first_token_at=0.0))
    answered["/v1/completions", "429", ""] += 1
    answered["/v1/completions", "200", "sql"] = 3
    grown = SystemSnapshot(
        workers=[worker("decode", 60, output_tokens=50.0), worker("prefill", 5, prompt_tokens=7.0)]
    )
    view.sample(104.0, grown)
    first, second = view.state(104.0, grown)["points"]
    assert (first["ttft"], first["requests"], first["output"], first["waiting"], first["kv_decode"]) == (
        None,
        0,
        0,
        3,
        0.3,
    )
    assert (second["requests"], second["errors"], second["output"], second["prompt"]) == (2.0, 0.5, 20.0, 0.0)
    assert second["ttft"] == [6.0, 8.7, 8.94]
    assert second["tpot"][0] == pytest.approx(
        (6 - 3) * 2.0 / 4
    )  # handoff, decode and coordinator, over the tokens after the first
    assert second["e2e"][0] == 14.0
    assert second["stages"] == [6.0] * 7  # seconds by stage, of the three that were answered
    assert (second["t"], second["kv_decode"], second["kv_prefill"]) == (5004.0, 0.6, 0.05)


def test_the_window_is_the_last_minute_and_the_findings_go_by_it() -> None:
    view = LiveView(0.0, wall=5000.0, objectives=Objectives(ttft_by_class={"standard": 5.0}))
    system = SystemSnapshot(ready=True, workers=[worker("decode", 30), worker("prefill", 5)])
    assert [finding["kind"] for finding in view.state(0.0, system)["findings"]] == ["idle"]
    for second in range(0, 120, 2):
        view.note(record(second, float(second), 1.0 if second % 4 else 2.0))
        view.sample(second + 2.0, system)
    state = view.state(120.0, system)
    assert (state["window"]["seconds"], state["window"]["requests"]) == (60.0, 30)
    assert state["window"]["stages"] == dict.fromkeys(get_args(Stage), 1.5)
    assert (state["window"]["kept"], state["window"]["goodput"]) == (
        0.5,
        0.25,
    )  # of 3 s and 6 s to the first token
    assert [finding["kind"] for finding in state["findings"]] == [
        "coordinator",
        "handoff",
    ]  # a seventh each; the coordinator two
    own = view.state(120.0, system, objectives=Objectives(ttft_s=10.0))
    assert own["window"]["kept"] == 1.0
    assert view.state(120.0, system, objectives=Objectives())["window"]["kept"] is None
    assert view.state(120.0, SystemSnapshot())["findings"][0]["kind"] == "no_workers"
    for second in range(120, 182, 2):
        view.sample(second + 2.0, system)
    assert [finding["kind"] for finding in view.state(182.0, system)["findings"]] == ["idle"]


def test_workers_that_do_not_fit_are_found_with_the_reason() -> None:
    gap = "prefill worker p and decode worker d do not fit together: their dtype differs"
    system = SystemSnapshot(gap=gap, workers=[worker("decode", 0), worker("prefill", 0)])
    (finding,) = LiveView(0.0, wall=5000.0).state(1.0, system)["findings"]
    assert finding["what"] == f"Not ready: {gap}."


def test_a_worker_that_starts_anew_counts_from_zero() -> None:
    view = LiveView(0.0, 0.0)
    for now, tokens in ((2.0, 1000.0), (4.0, 1100.0), (6.0, 40.0)):
        view.sample(now, SystemSnapshot(workers=[worker("decode", 0, output_tokens=tokens)]))
    assert [point["output"] for point in view.state(6.0, SystemSnapshot())["points"]] == [0, 50.0, 20.0]


def test_a_viewer_is_told_only_what_is_new_to_it_and_the_past_is_bounded() -> None:
    view = LiveView(0.0, 0.0)
    for number in range(1000):
        view.note(record(number, float(number), 0.1, tenant=f"t{number % 300}"))
        view.sample(2.0 * number, SystemSnapshot())
    everything = view.state(2000.0, SystemSnapshot())
    assert (len(everything["points"]), len(everything["requests"]), len(everything["tenants"])) == (
        NUM_POINTS,
        NUM_RECENT,
        200,
    )
    assert everything["tenants"][0] == {
        "tenant": "t0",
        "requests": 4,
        "prompt_tokens": 400,
        "cached_tokens": 256,
        "output_tokens": 20,
    }
    newest = everything["requests"][-1]
    assert newest["spans"][2] == ["prefill", 0.2, 0.3]
    new = view.state(2000.0, SystemSnapshot(), everything["points"][-2]["n"], newest["n"])
    assert (len(new["points"]), new["requests"]) == (1, [])


def test_the_flow_is_of_the_last_seconds() -> None:
    view = LiveView(0.0, 0.0)
    for number in range(30):
        view.note(record(number, float(number), 0.1, decode_worker=f"d{number % 2}"))
    flows = view.state(30.0, SystemSnapshot())["flows"]
    assert flows == [["p", "d0", 0.5], ["p", "d1", 0.5]]
    assert view.state(100.0, SystemSnapshot())["flows"] == []


def test_without_a_viewer_nothing_piles_up() -> None:
    view = LiveView(0.0, 0.0)
    for number in range(5000):
        view.note(record(number, number / 10, 0.01))
        if number % 20 == 19:
            view.sample(number / 10, SystemSnapshot())
    assert len(view._routes) <= 10 * 10 + 20
    assert len(view._fresh) == 0


async def test_the_feed_over_http(
    http: httpx.AsyncClient, server: HttpServer, dispatcher: FakeDispatcher
) -> None:
    await http.post("/v1/completions", json={"prompt": "quick", "max_tokens": 5})
    server.app.dashboard.views["tiny"].sample(
        server.app.dashboard.views["tiny"]._sampled_at + 2, dispatcher.system()
    )
    state = (await http.get("/dashboard/feed")).json()
    assert (state["model"], state["num_requests"], state["statuses"]) == ("tiny", 1, {"200": 1})
    assert [span[0] for span in state["requests"][0]["spans"]] == list(get_args(Stage))
    assert state["workers"][0]["blocks"] == [30, 0, 20, 50, 100]
    assert (await http.get("/dashboard/feed?after_point=x")).status_code == 400
    assert [finding["kind"] for finding in state["findings"]] == [
        "no_workers",
        "too_few",
    ]  # the fake has decode workers only
    assert (state["window"]["objectives"], state["cost"]) == (None, {})
    bound = (await http.get("/dashboard/feed?slo=ttft=30,tpot=0.5@p99")).json()["window"]
    assert (bound["kept"], bound["objectives"]["attainment"]) == (1.0, 0.99)
    for wrong in ("ttft", "ttft=1,ttft=2", "ttft=1@p0", "x" * 200):
        refused = await http.get("/dashboard/feed", params={"slo": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slo")


async def test_requests_refused_before_they_began_are_counted_and_logged(
    http: httpx.AsyncClient, server: HttpServer
) -> None:
    view = server.app.dashboard.views["tiny"]
    view.sample(view._sampled_at + 2, SystemSnapshot())
    server.app.metrics.request_ended("/v1/completions", "429")
    view.sample(view._sampled_at + 2, SystemSnapshot())
    state = (await http.get("/dashboard/feed")).json()
    assert state["statuses"] == {"429": 1}
    assert state["totals"]["refused"] == 1
    assert [(event["kind"], event["text"]) for event in state["events"]] == [
        ("refused", "1 request refused (429)")
    ]


async def test_the_page_is_for_everyone_and_may_load_nothing_but_its_own(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'; script-src 'self';" in page.headers["content-security-policy"]
    for path in ("app.js", "style.css", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"):
        response = await http.get(f"/dashboard/{path}")
        assert response.status_code == 200
        assert f"/{path.rpartition('.')[2].replace('js', 'javascript')}" in response.headers["content-type"]
    for path in ("vendor/uPlot-LICENSE", "%2e%2e/settings.py", "nothing.js", ""):
        assert (await http.get(f"/dashboard/{path}")).status_code == 404


class Known:
    """Keys are configured."""

    def account(self, authorization: bytes) -> Account:
        return ANONYMOUS


async def test_with_keys_configured_the_feed_is_for_operators(
    dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    app = HttpApp(dispatcher, model, AppParts(operators=Operators("k" * 32), tenancy=Tenancy(Known())))
    far = httpx.ASGITransport(app, client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=far, base_url="http://127.0.0.1") as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/dashboard/app.js")).status_code == 200
        assert (await client.get("/dashboard/feed")).status_code == 401
        assert (
            await client.get("/dashboard/feed", headers={"authorization": "Bearer " + "k" * 32})
        ).status_code == 200
