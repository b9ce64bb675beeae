"""Requests whose adapter only some workers have, or none, hold up no other, and do not wait for ever."""

from __future__ import annotations

from support.adapted_bench import Adapted, routes
from support.lifecycle_bench import ends

from splitserve.coordinator.lifecycle.actions import Action
from splitserve.coordinator.lifecycle.request import Request
from splitserve.transport.messages.messages import FirstToken, SamplingParams


def test_a_request_waits_for_a_worker_that_may_come_back_and_then_ends_with_a_sentence() -> None:
    bench = Adapted(unserved_s=30.0)
    for name in ("p", "d"):
        bench.report(name, "a:A")
    bench.ask("r", "A")
    assert not ends(bench.die("d"))
    bench.core.tick(bench.now)
    bench.now += 29.0
    assert not ends(bench.core.tick(bench.now))
    bench.now += 2.0
    (ended,) = ends(bench.core.tick(bench.now))
    assert ended.error == "unavailable"
    assert ended.message == (
        "waited 30 s: the adapter 'the-A' is on no prefill and decode worker that fit together any more"
    )


def test_a_request_whose_adapter_no_worker_has_any_more_ends_at_once() -> None:
    bench = Adapted(max_num_seqs=1)
    for name in ("p", "d"):
        bench.report(name, "a:A")
    bench.ask("r", "A")
    assert routes(bench.ask("s", "A")) == []
    bench.report("p")
    (ended,) = ends(bench.report("d"))
    assert ended.error == "unavailable"
    assert ended.message.endswith("any more; send the request again")
    assert list(bench.core.requests) == ["r"]  # which runs on


def test_the_content_of_a_folder_that_has_changed_is_served_until_it_is_gone() -> None:
    bench = Adapted("a:A")
    for name in ("p", "p2", "d", "d2"):
        bench.report(name, "a:B", ":A")
    assert bench.names.served == {"a": "B"}
    assert len(routes(bench.ask("r", "A"))) == 1


def test_requests_for_an_adapter_that_is_not_there_hold_up_no_other() -> None:
    bench = Adapted("a:A", max_num_seqs=64, starving_s=2.0)
    for n in range(300):
        bench.ask(f"a{n}", "A", tenant=f"t{n % 9}")
    for name in ("d", "d2"):
        bench.report(name)  # p and p2 have it yet
    for request in list(bench.core.requests.values()):
        if request.dispatch >= 0:
            bench.core._machine.retry(request, "tested", bench.now, counts=False)
    assert len(bench.core.queue) == 300
    for passed in (0.0, 5.0):
        bench.now += passed
        for n in range(3):
            assert routes(bench.ask(f"r{passed}-{n}", tenant="t1"))


def busy_with(bench: Adapted, adapter: str, num: int) -> list[str]:
    """Submit this many requests; return those that wait."""
    return [f"{adapter}{n}" for n in range(num) if not routes(bench.ask(f"{adapter}{n}", adapter))]


def test_requests_whose_adapters_workers_are_full_hold_up_no_other() -> None:
    bench = Adapted(max_num_seqs=2, starving_s=2.0)
    for name in ("p", "p2", "d"):
        bench.report(name, "a:A")
    assert len(busy_with(bench, "A", 60)) == 58
    bench.now += 5.0
    assert [route[2] for route in routes(bench.ask("r"))] == ["d2"]


def test_many_that_wait_are_tried_again_only_once_workers_with_their_adapter_have_room() -> None:
    bench = Adapted(max_num_seqs=2)
    for name in ("p", "p2", "d"):
        bench.report(name, "a:A")
    waiting = busy_with(bench, "A", 60)
    tried, placement = list[str](), bench.core._placement
    dispatch = placement._dispatch

    def counted(request: Request, now: float) -> list[Action]:
        tried.append(request.request_id)
        return dispatch(request, now)

    placement._dispatch = counted  # type: ignore[method-assign]
    bench.load("d2", [])
    bench.core.tick(bench.now)
    assert not routes(bench.ask("one more", "A", prompt_token_ids=[1] * 4))
    assert not tried
    assert [route[0] for route in routes(bench.core.cancel("A0", bench.now))] == waiting[:1]
    assert not routes(bench.ask("shorter", "A", prompt_token_ids=[1]))
    assert [route[0] for route in routes(bench.ask("r"))] == ["r"]


def test_a_request_for_an_adapter_does_not_starve_behind_others() -> None:
    """It needs the room of two others on d. As one of these ends, the next one waits already."""
    bench = Adapted(max_num_seqs=8, starving_s=2.0)
    for name in ("p", "p2", "d"):
        bench.report(name, "a:A")

    def small(name: str) -> list[tuple[str, str, str]]:
        """For the model itself: one block; its prompt is computed at once."""
        placed = routes(bench.ask(name, prompt_token_ids=[1]))
        for _, prefill, _ in placed:
            first = FirstToken(coordinator=7, dispatch=bench.core.requests[name].dispatch, index=0, token=5)
            placed += routes(bench.send(prefill, first))
        return placed

    names = [f"s{n}" for n in range(8)]
    on_d = [name for name in names if small(name)[0][2] == "d"]
    for name in on_d[3:]:
        bench.core.cancel(name, bench.now)
    bench.load("d2", [], blocks_free=1)
    bench.load("d", [], blocks_free=6)  # d has room for 8 tokens more, d2 for none
    assert bench.core.pools.workers["d", 1].room == 8
    assert not routes(bench.ask("r", "A", prompt_token_ids=[1] * 16))
    for n in range(9):
        bench.now += 1.0
        small(f"t{n}")  # another one waits, or takes the room
        here = [r.request_id for r in bench.core._machine.assignments.of(bench.core.pools.workers["d", 1])]
        if "r" in here:
            break
        bench.core.cancel(here[0], bench.now)
    assert 3 <= n < 8


def test_requests_that_wait_for_what_others_do_not_need_are_told_from_those_without_room() -> None:
    """A longer request before it found no room: that is another reason."""
    bench = Adapted("a:A", max_num_seqs=8, starving_s=2.0)
    for n in range(4):  # then the prefill workers take no prompt of 14 tokens or more
        assert routes(bench.ask(f"x{n}", prompt_token_ids=[1] * 14))
    assert not routes(bench.ask("r", "A", prompt_token_ids=[1] * 20))
    for name in ("d", "d2"):
        bench.report(name)
    bench.now += 5.0
    assert not routes(bench.ask("long", prompt_token_ids=[1] * 16, priority=-1))
    assert routes(bench.ask("short", prompt_token_ids=[1], priority=1))


def test_a_worker_with_the_adapter_serves_it_though_only_others_hold_sequences_as_long() -> None:
    bench = Adapted()
    bench.hello("short", "decode", max_model_len=20)
    for name in ("p", "short"):
        bench.report(name, "a:A")
    sampling = SamplingParams(max_tokens=100)
    assert routes(bench.ask("r", "A", sampling=sampling)) == [("r", "p", "short")]


def test_a_long_prompt_for_an_adapter_does_not_starve_behind_others() -> None:
    """It needs the room of two others on p. As one of these is computed, the next one waits already."""
    bench = Adapted(max_num_seqs=64, starving_s=2.0)
    for name in ("p", "d"):
        bench.report(name, "a:A")
    for n in range(10):
        bench.ask(f"s{n}", prompt_token_ids=[1] * 3)
    assert not routes(bench.ask("r", "A", prompt_token_ids=[1] * 23))
    for n in range(9):
        bench.now += 1.0
        dispatch = min(bench.core.pools.workers["p", 1].pending)
        first = FirstToken(coordinator=7, dispatch=dispatch, index=0, token=5)
        placed = routes(bench.send("p", first)) + routes(bench.ask(f"t{n}", prompt_token_ids=[1] * 3))
        if "r" in [request for request, *_ in placed]:
            break
    assert 2 <= n < 8


def test_a_suspect_that_waits_to_run_apart_from_others_holds_up_none() -> None:
    """It may have killed a worker; the other suspect runs on the only worker with their adapter."""
    bench = Adapted(max_num_seqs=8, suspect_after=1)
    for name in ("p", "p2", "d"):
        bench.report(name, "a:A")
    for name in ("s1", "s2"):
        ((_, prefill, _),) = routes(bench.ask(name, "A"))
        dispatch = bench.core.requests[name].dispatch
        bench.send(prefill, FirstToken(coordinator=7, dispatch=dispatch, index=0, token=5))
        bench.joined(dispatch)
    bench.die("d")
    bench.hello("d", "decode", incarnation=2)
    bench.numbers["d"] = 0
    assert len(routes(bench.report("d", "a:A", incarnation=2))) == 1
    assert [request.suspect for request in bench.core.queue] == [True]
    assert [route[2] for route in routes(bench.ask("r", "A"))] == ["d"]


def test_prompts_are_computed_while_a_request_waits_for_the_only_decode_worker_with_its_adapter() -> None:
    """No prefill worker has room for its prompt either, and none has to: d is full, maybe for long."""
    bench = Adapted(max_num_seqs=64, starving_s=2.0)
    for name in ("p", "p2", "d"):
        bench.report(name, "a:A")
    assert len(routes(bench.ask("first", "A"))) == 1
    bench.load("d", [], blocks_free=0)
    for n in range(8):
        assert routes(bench.ask(f"s{n}"))
    assert not routes(bench.ask("r", "A", prompt_token_ids=[1] * 30))
    bench.now += 5.0
    assert [route[2] for route in routes(bench.ask("t"))] == ["d2"]
