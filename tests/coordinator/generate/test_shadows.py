"""Shadows: copies of a route's requests, which reach no client and are compared with the first ones."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from coordinator.generate.test_adapters_by_http import CHAT
from prometheus_client.parser import text_string_to_metric_families
from support.http_fakes import ANSWER, FakeDispatcher
from support.routed_server import Routed, routed_server

from splitserve.coordinator.generate import shadows
from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.metrics.trace_log import TimedSink
from splitserve.coordinator.text.served_model import ServedModel

NAME = "splitserve_shadow_first_difference_tokens"
PATH = "/v1/chat/completions"
ROUTE: Any = {"shares": {"a": 1}, "shadow": "b", "shadow_percent": 100}


@pytest.fixture
async def routed(dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path) -> AsyncIterator[Routed]:
    async with routed_server(tmp_path, dispatcher, model, **ROUTE) as server:
        yield server


async def ask(routed: Routed, **more: Any) -> str:
    answer = await routed.http.post(PATH, json={**CHAT, "model": "chat", **more})
    assert answer.status_code == 200, answer.text
    return answer.text


def results(routed: Routed) -> dict[str, int]:
    counts = routed.server.app.generation.route_counts.shadows
    assert {route for route, _ in counts} <= {"chat"}
    return {result: count for (_, result), count in counts.items()}


async def until(routed: Routed, **expected: int) -> None:
    async with asyncio.timeout(30):
        while results(routed) != expected:
            await asyncio.sleep(0.005)
    await routed.b.until(lambda: not routed.b.running)
    assert not routed.server.app.generation.shadows._running


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_answer(routed: Routed, stream: bool) -> None:
    await ask(routed, stream=stream)
    await until(routed, same=1)
    (first,), (copy,) = routed.a.requests, routed.b.requests
    assert copy.request_id == f"shadow-{first.request_id}"
    assert list(copy.prompt_token_ids) == list(first.prompt_token_ids)
    assert (copy.priority_class, copy.tenant, copy.sampling) == ("batch", "", first.sampling)
    assert (first.is_copy, copy.is_copy) == (False, True)
    assert not routed.b.cancelled


async def test_sampled_answers_have_one_seed(routed: Routed) -> None:
    """The fake's answer depends on it; without one, the first's is drawn."""
    for more in ({}, {"seed": 7}, {"n": 3}):
        await ask(routed, temperature=1.0, **more)
    await until(routed, same=3)
    seeds = [[request.sampling.seed for request in each.requests] for each in (routed.a, routed.b)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 5


async def test_a_different_answer(routed: Routed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    script = routed.a.script
    routed.b.script = lambda request: [*script(request)[:5], 9, *script(request)]
    for _ in range(2):
        await ask(routed)
    await until(routed, different=2)
    assert len(routed.b.cancelled) == 2, "what differs is not finished"
    (line,) = [record for record in caplog.records if "differ from token" in record.getMessage()]
    fields = line.fields  # type: ignore[attr-defined]
    assert fields["shadow_request_id"] == f"shadow-{fields['request_id']}"
    for word in ("route chat", "answers of a (", "and b (", "token 5 on", fields["request_id"]):
        assert word in line.getMessage()
    text = (await routed.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [(s.labels, s.value) for s in families["splitserve_shadow"].samples] == [
        ({"route": "chat", "result": "different"}, 2)
    ]
    samples = families[NAME].samples
    found = {s.name.removeprefix(NAME) + s.labels.get("le", ""): s.value for s in samples}
    assert (found["_bucket4.0"], found["_bucket8.0"], found["_sum"], found["_count"]) == (0, 2, 10, 2)


async def test_shorter_and_longer_answers_differ(routed: Routed) -> None:
    script = routed.a.script
    for change in (lambda ids: ids[:-3], lambda ids: [*ids, 9]):
        routed.b.script = lambda request, change=change: change(script(request))
        await ask(routed)
    await until(routed, different=2)


async def test_a_copy_that_fails(routed: Routed) -> None:
    routed.b.fail_after = (2, Ended(error="failed", message="no luck"))
    await ask(routed)
    await until(routed, failed=1)


@pytest.mark.parametrize("lack", ["queues", "is_full", "workers"])
async def test_a_copy_without_room_is_dropped(routed: Routed, lack: str) -> None:
    if lack == "workers":
        routed.b.refuse = lambda request: Ended(error="unavailable", message="no worker is connected")
    else:
        setattr(routed.b, lack, True)
    await ask(routed, n=2)
    await until(routed, dropped=1)
    assert len(routed.b.requests) == 1, "the second is not even tried"
    assert len(routed.b.cancelled) == (lack == "queues")


async def test_only_so_many_run(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "MAX_RUNNING", 3)
    routed.b.hold = True
    await ask(routed, n=2)
    await ask(routed, n=2)
    assert results(routed) == {"dropped": 1}
    await ask(routed)
    assert len(routed.b.running) == 3
    routed.b.hold = False
    await until(routed, dropped=1, same=2)
    await ask(routed, n=3)
    await until(routed, dropped=1, same=3)


async def test_their_prompts_are_bounded(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of images are large, and a slow copy keeps its own after the first has ended."""
    routed.b.hold = True
    await ask(routed)
    (shadow,) = routed.server.app.generation.shadows._running
    monkeypatch.setattr(shadows, "MAX_PROMPT_BYTES", int(2.5 * shadow.num_prompt_bytes))
    await ask(routed)
    await ask(routed)
    assert results(routed) == {"dropped": 1}
    routed.b.hold = False
    await until(routed, dropped=1, same=2)


async def test_a_stop_string_ends_the_comparison(routed: Routed) -> None:
    """The first is cut off there; the copy, which is slower, need not go on."""
    routed.b.step_s = 0.002
    await ask(routed, stop=["answer"])
    await until(routed, same=1)
    assert len(routed.b.cancelled) == 1


async def test_a_client_that_goes(routed: Routed) -> None:
    routed.a.step_s = routed.b.step_s = 0.002
    body = {**CHAT, "model": "chat", "stream": True}
    async with routed.http.stream("POST", PATH, json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await until(routed, same=1)
    assert len(routed.a.cancelled) == len(routed.b.cancelled) == 1


async def test_a_first_that_fails_has_nothing_to_compare(routed: Routed) -> None:
    routed.a.fail_after, routed.b.hold = (3, Ended(error="failed")), True
    answer = await routed.http.post(PATH, json={**CHAT, "model": "chat"})
    assert answer.status_code == 500
    await until(routed, dropped=1)


async def test_a_broken_copy_takes_nothing_from_the_first(
    routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, side: int, token_id: int) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(shadows.Comparison, "push", broken)
    routed.b.refuse = lambda request: None
    routed.b.hold = True
    assert json.loads(await ask(routed))["choices"][0]["message"]["content"] == ANSWER
    assert routed.server.app.metrics.failures.counts["shadows"] > 0
    routed.server.app.generation.shadows.stop()
    await until(routed, dropped=1)


async def test_what_is_not_copied(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    await ask(routed, model="a")
    scored = {"model": "chat", "prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 1}
    assert (await routed.http.post("/v1/completions", json=scored)).status_code == 200
    routed.write(**{**ROUTE, "shares": {"b": 1}})
    await ask(routed)
    routed.write(**{**ROUTE, "shadow_percent": 0})
    await ask(routed)
    routed.write(**{**ROUTE, "shadow_percent": 25})
    drawn = Counter[bool]()
    for number in range(8):
        monkeypatch.setattr(shadows.random, "random", lambda number=number: number / 8)
        before = len(routed.b.requests)
        await ask(routed)
        await asyncio.sleep(0)
        drawn[len(routed.b.requests) > before] += 1
    assert drawn == {True: 2, False: 6}
    await until(routed, same=2)


async def test_times_of_tokens_are_still_noted(routed: Routed) -> None:
    routed.server.app.generation.times_tokens = True
    await ask(routed)
    await until(routed, same=1)
    sink = routed.a.requests[0].sink
    assert isinstance(sink, TimedSink)
    assert len(sink.times) > 5


async def test_shadows_are_counted_for_no_client(routed: Routed) -> None:
    await ask(routed)
    await until(routed, same=1)
    first, second = routed.server.app.servings.all
    assert sum(first.metrics.counts.requests.values()) == 1
    assert not second.metrics.counts.requests
