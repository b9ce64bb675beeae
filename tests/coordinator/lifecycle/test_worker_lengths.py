"""Workers that hold sequences of different lengths: no request goes to one that cannot hold it, and what none
could take is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.lifecycle_bench import Bench, ends, sent

from splitserve.cli.settings import DEMO_MODEL
from splitserve.coordinator.errors import ContextTooLong
from splitserve.coordinator.generate.bodies.completion import CompletionRequest
from splitserve.coordinator.generate.request_sampling import sampling_of
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.transport.messages.messages import Prefill, SamplingParams


def long_one(num_tokens: int = 30, max_tokens: int = 20) -> dict[str, object]:
    return {"prompt_token_ids": list(range(num_tokens)), "sampling": SamplingParams(max_tokens=max_tokens)}


def decoder_of(prefill: Prefill) -> str:
    return prefill.decode.worker_id


def test_a_prompt_is_refused_that_some_worker_could_not_hold() -> None:
    bench = Bench()
    bench.hello("short", "decode", max_model_len=20)
    (ended,) = ends(bench.submit("r", **long_one()))
    assert ended.error == "refused"
    assert "room for 19" in ended.message


def test_a_mixed_worker_keeps_a_block_for_the_one_that_moves_between_its_roles() -> None:
    """A prompt that takes every block would wait there for ever, and all others behind it."""
    bench = Bench()
    for role in ("prefill", "decode"):
        bench.hello(f"m:{role}", role, process="m", mixed=True, num_blocks=6, max_model_len=24)
    (ended,) = ends(bench.submit("r", **long_one(20, 4)))
    assert ended.error == "refused"
    assert "room for 19" in ended.message
    (prefill,) = sent(bench.submit("s", **long_one(19, 1)), Prefill)
    assert decoder_of(prefill) in ("m:decode", "d")


def test_a_request_that_waits_while_a_shorter_worker_comes_goes_to_one_that_holds_it() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("first")
    assert sent(bench.submit("waits", **long_one()), Prefill) == []
    bench.hello("short", "decode", max_model_len=20)
    bench.first(1)
    bench.joined(1)
    actions = [*bench.step(1, 1, 5, "length"), *bench.core.tick(bench.now)]
    (prefill,) = sent(actions, Prefill)
    assert decoder_of(prefill) == "d"
    (prefill,) = sent(bench.submit("small", prompt_token_ids=[1, 2]), Prefill)
    assert decoder_of(prefill) == "short"


def test_one_that_cannot_be_held_whole_runs_as_far_as_it_fits() -> None:
    """A worker came back to a fuller host, and there is no other: better an answer that ends early."""
    bench = Bench()
    bench.submit("r", **long_one(10, 80))
    bench.first(1)
    bench.joined(1)
    actions = bench.hello("d", "decode", incarnation=2, max_model_len=40)
    (prefill,) = sent([*actions, *bench.core.tick(bench.now + 1)], Prefill)
    assert decoder_of(prefill) == "d"
    bench.now += 2
    actions = bench.hello("d", "decode", incarnation=3, max_model_len=8)
    assert (
        sent([*actions, *bench.core.tick(bench.now + 1)], Prefill) == []
    )  # but not where not even what it has fits


def test_the_http_server_goes_by_what_the_workers_hold() -> None:
    model = ServedModel.load(Path(DEMO_MODEL), "demo")
    assert model.max_model_len == 2048
    held = [0]
    model = replace(model, workers_hold=lambda: held[0])
    assert model.max_model_len == 2048
    held[0] = 100
    assert model.max_model_len == 100
    assert sampling_of(CompletionRequest(prompt="x", max_tokens=60), model, 40).max_tokens == 60
    with pytest.raises(ContextTooLong, match="maximum context length is 100 tokens"):
        sampling_of(CompletionRequest(prompt="x", max_tokens=61), model, 40)
    held[0] = 4096
    assert model.max_model_len == 2048
