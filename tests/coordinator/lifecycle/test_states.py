"""Sequences of a model with states: each takes two copies of them beside its tokens' blocks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.lifecycle_bench import MODEL, Bench, ends, make_hello

from splitserve.coordinator.lifecycle.routing import can_send_prefix
from splitserve.coordinator.lifecycle.worker import NO_ROOM, WorkerRecord
from splitserve.transport.messages.messages import Load, SamplingParams, u32

STATE = 2
COPIES = 2 * STATE
WITH_STATES = replace(MODEL, state_blocks=STATE)
SIZE = MODEL.block_size


def worker(num_free: int, **more: Any) -> WorkerRecord:
    """A decode worker that has a sequence, and reports this number of free blocks."""
    record = WorkerRecord(make_hello("d", "decode", model=WITH_STATES, **more), 0.0)
    record.reserve_sequence(1, 0)
    names = (
        "blocks_cached",
        "blocks_used",
        "blocks_leased",
        "num_running",
        "num_waiting",
        "num_waiting_tokens",
    )
    counts = dict.fromkeys(names, 0) | {"blocks_free": num_free, "steps": 1}
    flags = {"busy": True, "accepting": True, "draining": False}
    record.report(Load(worker_id="d", incarnation=1, dispatches=u32([1]), **counts, **flags))
    return record


def test_a_sequence_counts_with_both_copies_of_its_state() -> None:
    assert worker(30).blocks_for(10) == 3 + COPIES


@pytest.mark.parametrize(("num_free", "tokens"), [(COPIES, NO_ROOM), (COPIES + 1, 0), (COPIES + 3, 2 * SIZE)])
def test_a_decode_worker_has_room_for_what_fits_beside_them(num_free: int, tokens: int) -> None:
    """A block more is left to the sequences that run."""
    assert worker(num_free).room == tokens


def test_of_a_worker_that_borrows_half_of_the_blocks_are_left() -> None:
    assert worker(25 + COPIES + 2, home="prefill", mixed=True).room == 2 * SIZE
    assert worker(25 + COPIES - 1, home="prefill", mixed=True).room == NO_ROOM


def test_a_mixed_worker_keeps_room_for_both_roles_copies() -> None:
    """A prompt that leaves no room for the decode role's would wait there for ever."""
    bench = Bench()
    num_blocks = 5 + 1 + 2 * COPIES
    for role in ("prefill", "decode"):
        bench.hello(
            f"m:{role}", role, process="m", mixed=True, num_blocks=num_blocks, model=WITH_STATES,
            max_model_len=1000,
        )  # fmt: skip
    tokens = list(range(5 * SIZE))
    (ended,) = ends(bench.submit("r", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=4)))
    assert ended.error == "refused"
    assert f"room for {5 * SIZE - 1}" in ended.message


@pytest.mark.parametrize("model", [MODEL, WITH_STATES], ids=["without", "with"])
def test_blocks_are_pulled_from_workers_that_have_their_state(model: Any) -> None:
    """A decode worker has none behind them."""
    bench = Bench(min_pull_tokens=8)
    for name, role in (("a", "prefill"), ("b", "prefill"), ("d", "decode")):
        bench.hello(name, role, incarnation=2, model=model)
    a, b, d = list(bench.core.pools.workers.values())[-3:]
    assert can_send_prefix(b, a)
    assert can_send_prefix(d, a) == (model is MODEL)
