"""Steps that raise, between two real workers: a request that makes them raise fails alone; a worker whose
steps all raise ends, at once where its GPU is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.worker_pair import WorkerPair, spec

from splitserve.bench.null_workers import NullRunner
from splitserve.engine.errors import DeviceLostError, EngineError
from splitserve.engine.role_core import BROKEN_AFTER
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.transport.messages.messages import RequestFailed, StepTokens, from_u32

NUM_SEQS, POISON, NUM_TOKENS = 6, 3, 50


class Fragile(NullRunner):
    """Raises where a sequence of these prompts is in the batch."""

    def __init__(self, *poisonous: int, error: Exception | None = None) -> None:
        self._poisonous = {number + 1 for number in poisonous}
        self._error = error or ValueError("this model cannot do that")
        self.num_failed_steps = 0

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        if any(
            state is not None and state.prompt_token_ids[0] in self._poisonous for state in batch.sampling
        ):
            self.num_failed_steps += 1
            raise self._error
        return super().execute(batch, on_layer)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_whose_steps_raise_fails_alone(role: str) -> None:
    with WorkerPair(runners={role: Fragile(POISON)}) as pair:
        pair.ask(*(spec(i, max_tokens=NUM_TOKENS) for i in range(NUM_SEQS)))

        def ended() -> set[int]:
            steps = [m for m in pair.received if isinstance(m, StepTokens)]
            return {from_u32(m.dispatches)[row] for m in steps for row in m.finished}

        def failed() -> list[RequestFailed]:
            return [m for m in pair.received if isinstance(m, RequestFailed)]

        pair.until(lambda: len(ended()) + len(failed()) == NUM_SEQS)
        assert ended() == set(range(NUM_SEQS)) - {POISON}
        ((dispatch, kind, message),) = [(m.dispatch, m.kind, m.message) for m in failed()]
        assert (dispatch, kind, message) == (POISON, "internal", f"{role} failed: this model cannot do that")
        assert pair.threads[role].is_alive()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_whose_steps_all_raise_ends_and_gives_back_what_failed(role: str) -> None:
    with WorkerPair(runners={role: Fragile(*range(BROKEN_AFTER))}) as pair:
        for number in range(BROKEN_AFTER):
            assert pair.threads[role].is_alive()
            pair.ask(spec(number))
            pair.until(
                lambda: sum(isinstance(m, RequestFailed) for m in pair.received) == number + 1  # noqa: B023
            )
        pair.threads[role].join(60)
        error = pair.errors[role]
    assert isinstance(error, EngineError)
    assert "requests' steps all failed" in str(error)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_whose_gpu_is_lost_ends_with_that_step(role: str) -> None:
    runner = Fragile(
        *range(NUM_SEQS), error=RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    )
    with WorkerPair(runners={role: runner}) as pair:
        pair.ask(*(spec(i) for i in range(NUM_SEQS)))
        pair.threads[role].join(60)
        assert not pair.threads[role].is_alive()
    assert isinstance(pair.errors[role], DeviceLostError)
    assert runner.num_failed_steps == 1, "who was in it is not tried apart, here"
