"""A model that drafts is given the token behind each chunk, except where the step itself samples it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace
from support.drafting import Bench

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import StepOutput
from splitserve.prefill.chunks import PrefillStep
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.messages.messages import Peer, RequestSpec, SamplingParams, u32

BLOCK = 4
PEER = Peer(worker_id="d", incarnation=1, address="x")


def spec(dispatch: int, tokens: list[int], num_prompt_tokens: int = 0, max_tokens: int = 4) -> RequestSpec:
    return RequestSpec(
        request_id=f"r{dispatch}",
        epoch=0,
        dispatch=dispatch,
        coordinator=1,
        token_ids=u32(tokens),
        num_prompt_tokens=num_prompt_tokens or len(tokens),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_s=60.0,
    )


def steps(*specs: RequestSpec, budget: int = 6, model_drafts: bool = True) -> Iterator[PrefillStep]:
    scheduler = PrefillScheduler(
        BlockManager(64), BLOCK, "model", budget, max_num_seqs=8, model_drafts=model_drafts
    )
    for each in specs:
        scheduler.add(each, PEER, 0.0)
    while (step := scheduler.schedule(0.0)) is not None:
        yield step
        scheduler.complete(step)


def next_ids(step: PrefillStep) -> list[int]:
    assert step.batch.next_ids is not None
    assert step.batch.next_ids.dtype == np.int32
    return step.batch.next_ids.tolist()


def test_a_chunk_is_followed_by_the_next_ones_first_token() -> None:
    made = list(steps(spec(1, list(range(100, 114)))))
    assert [next_ids(step) for step in made] == [[106], [112], [-1]]
    assert [int(step.batch.token_ids[0]) for step in made[1:]] == [106, 112]


def test_each_prompt_of_a_step_has_its_own() -> None:
    made = list(steps(spec(1, [1, 2]), spec(2, list(range(100, 110)))))
    assert [next_ids(step) for step in made] == [[-1, 104], [-1]]


def test_a_prompt_that_comes_again_goes_on_with_its_output() -> None:
    again = replace(spec(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], num_prompt_tokens=6), epoch=1)
    assert [next_ids(step) for step in steps(again)] == [[7], [-1]], "7 is its first output token"


def test_where_nothing_is_sampled_any_token_stands_for_it() -> None:
    (step,) = steps(spec(1, [1, 2, 3], max_tokens=0))
    assert step.batch.sampling == [None]
    assert next_ids(step) == [0]


def test_a_model_that_does_not_draft_gets_none() -> None:
    assert [step.batch.next_ids for step in steps(spec(1, [1, 2, 3]), model_drafts=False)] == [None]


def test_a_step_of_both_roles_has_rows_of_both_kinds_and_drafts_of_the_first() -> None:
    bench = Bench(guess=lambda text, count: [1] * count)
    bench.join(1, [1, 2, 3], 30)
    bench.schedule()
    bench.run()
    rows = bench.schedule()
    chunks = next(steps(spec(1, [1, 2]), spec(2, list(range(100, 110)))))
    assert rows is not None
    both, n = rows.batch.followed_by(chunks.batch), rows.batch.num_seqs
    assert n > 1
    assert both.next_ids is not None
    assert both.next_ids.tolist() == [-1] * n + [-1, 104]
    assert both.draft_of is not None
    assert both.draft_of.tolist() == [-1, *range(n - 1), -1, -1]
    assert both.num_drafts is not None
    assert rows.batch.num_drafts is not None
    assert both.num_drafts.tolist() == [*rows.batch.num_drafts, 0, 0]
    output = StepOutput(np.zeros(n + 2, np.int32), drafts={n - 1: [5, 6]})
    assert [part.drafts for part in output.split(n)] == [{n - 1: [5, 6]}, {}]
