"""Each policy over snapshots of the workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from support.lifecycle_bench import make_hello

from splitserve.coordinator.lifecycle.routing import Need, choose_decode, choose_pair, choose_prefill, fitting
from splitserve.coordinator.lifecycle.worker import WorkerRecord
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import ModelIdentity

MODEL = ModelIdentity(kv_name="m", dtype="f", block_size=16, cache_map=states(1, 8), block_bytes=8)
HASHES = [bytes([i]) * 16 for i in range(10)]


def worker(name: str, role: Any = "prefill", mixed: bool = False, **state: Any) -> WorkerRecord:
    """``mixed``: of a process of that name."""
    named = {"worker_id": f"{name}:{role}", "process": name, "mixed": True} if mixed else {}
    sizes = {"max_model_len": 1000, "num_blocks": 100, "max_num_seqs": 10, "max_batch_tokens": 512}
    hello = make_hello(name, role, model=MODEL, **sizes, **named)
    made = WorkerRecord(hello, 0.0)
    for dispatch, num_tokens in state.pop("pending", {}).items():
        made.reserve_prompt(dispatch, num_tokens)
    for key, value in state.items():
        setattr(made, key, value)
    return made


def need(turn: int = 0, session: str = "", num_tokens: int = 160) -> Need:
    return Need(num_tokens, HASHES[0], lambda: HASHES, session, turn)


def chosen(policy: Any, workers: list[WorkerRecord], wanted: Need) -> str:
    return choose_prefill(policy, workers, wanted).hello.worker_id


def test_round_robin_takes_turns() -> None:
    workers = [worker(n) for n in "abc"]
    assert [chosen("round_robin", workers, need(t)) for t in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_least_loaded_goes_where_least_waits() -> None:
    assert (
        chosen("least_loaded", [worker("a", pending={1: 100}), worker("b", pending={1: 10})], need()) == "b"
    )


def test_prefix_goes_where_most_is_cached_whatever_the_load() -> None:
    workers = [worker("a", cached=set(HASHES[:2])), worker("b", cached=set(HASHES[:7]), pending={1: 9999})]
    assert chosen("prefix", workers, need()) == "b"


def test_a_cached_block_counts_only_with_all_before_it() -> None:
    workers = [worker("a", cached=set(HASHES[1:])), worker("b", cached=set(HASHES[:1]))]
    assert chosen("prefix", workers, need()) == "b"


def test_sticky_keeps_a_session_and_moves_only_those_of_a_lost_worker() -> None:
    workers = [worker(n) for n in "abcd"]
    before = {s: chosen("sticky", workers, need(session=s)) for s in map(str, range(200))}
    assert min(Counter(before.values()).values()) > 20
    after = {s: chosen("sticky", workers[:3], need(session=s)) for s in before}
    assert all(after[s] == home for s, home in before.items() if home != "d")


def test_no_other_policy_sends_a_session_past_the_better_worker() -> None:
    loaded, idle = worker("a", pending={1: 100}), worker("b")
    for policy in ("least_loaded", "prefix", "hybrid"):
        assert {chosen(policy, [loaded, idle], need(session=str(n))) for n in range(20)} == {"b"}, policy


def test_hybrid_weighs_waiting_work_against_cached_work() -> None:
    cached, idle = worker("a", cached=set(HASHES[:8])), worker("b")
    assert chosen("hybrid", [cached, idle], need()) == "a"
    cached.reserve_prompt(1, 500)
    assert chosen("hybrid", [cached, idle], need()) == "b"


def test_hybrid_spreads_equals_and_keeps_sessions_among_equals() -> None:
    workers = [worker(n) for n in "ab"]
    assert {chosen("hybrid", workers, need(t)) for t in range(20)} == {"a", "b"}
    assert len({chosen("hybrid", workers, need(t, session="s")) for t in range(20)}) == 1


def test_decode_goes_where_max_room_is_left() -> None:
    full, empty = worker("a", "decode", dispatches={1, 2, 3, 4, 5}), worker("b", "decode", dispatches={6})
    found = choose_decode("hybrid", [full, empty], need())
    assert found is empty
    cached = worker("c", "decode", dispatches={7}, cached=set(HASHES))
    assert choose_decode("hybrid", [full, empty, cached], need()) is cached


def pair_of(name: str, **state: Any) -> tuple[WorkerRecord, WorkerRecord]:
    """A mixed worker's two halves; the state is that of the decode half."""
    return worker(name, "prefill", mixed=True), worker(name, "decode", mixed=True, **state)


def test_a_mixed_worker_generates_for_what_it_computes() -> None:
    (prefill, decode), (other_prefill, other_decode) = pair_of("a"), pair_of("b")
    plain_prefill, plain_decode = worker("p"), worker("d", "decode")
    assert fitting([prefill], [other_decode, plain_decode]) == ([], [])
    assert fitting([prefill, other_prefill], [decode, plain_decode]) == ([prefill], [decode])
    assert fitting([plain_prefill], [decode]) == ([plain_prefill], [decode])
    for policy in ("hybrid", "least_loaded"):
        assert choose_pair(policy, [prefill, plain_prefill], [plain_decode], need()) == (
            plain_prefill,
            plain_decode,
        )
        assert choose_pair(policy, [prefill], [decode], need()) == (prefill, decode)
    busy = pair_of("c", dispatches={1, 2, 3})
    chosen_pair = choose_pair("hybrid", [prefill, other_prefill, busy[0]], [decode, busy[1]], need())
    assert chosen_pair == (prefill, decode), "where most room is, and both halves"


def test_mixed_workers_alone_are_chosen_by_room_less_what_waits() -> None:
    """What waits is a share of two steps' prompts, here 1,024 tokens: prompts, and a sixteenth of the new
    one's tokens for each sequence. A row is a tenth of the room."""

    def goes_to_the_other(waiting: int, running: int) -> bool:
        prefill, decode = pair_of("a", dispatches=set(range(running)))
        other = pair_of("b", dispatches={8, 9})
        if waiting:
            decode.dispatches.add(100)
            prefill.reserve_prompt(100, waiting)
        pair = choose_pair("hybrid", [prefill, other[0]], [decode, other[1]], need())
        assert pair in ((prefill, decode), other), "both halves of one"
        return pair == other

    assert not goes_to_the_other(waiting=0, running=0), "it is idle"
    assert goes_to_the_other(waiting=200, running=0), "a row less, but the prompt would wait"
    assert not goes_to_the_other(waiting=20, running=0), "less than the other's sequences would"
    assert goes_to_the_other(waiting=0, running=3)


def test_a_prompt_is_computed_locally_where_that_costs_less() -> None:
    """Tokens to compute there, and as many for every sequence that waits for them there; against those at a
    prefill worker."""
    local, decode = pair_of("a")
    remote = worker("p")
    assert choose_pair("hybrid", [remote, local], [decode], need()) == (local, decode), (
        "nobody is disturbed, nothing moves"
    )
    decode.dispatches = {1, 2}
    assert choose_pair("hybrid", [remote, local], [decode], need()) == (remote, decode)
    local.cached = set(HASHES[:9])  # of ten blocks: a follow-up turn
    assert choose_pair("hybrid", [remote, local], [decode], need()) == (local, decode)
    local.cached = set()
    remote.reserve_prompt(7, 2000)
    assert choose_pair("hybrid", [remote, local], [decode], need(num_tokens=160)) == (local, decode), (
        "a short one need not wait"
    )
    assert choose_pair("hybrid", [remote, local], [decode], need(num_tokens=1600)) == (remote, decode)
