"""The imitation of DistServe's simulator against what can be added up, and its analytic case."""

from __future__ import annotations

import pytest
from support.simulated import DECODE_S, PREFILL_S, TOKEN_S, profile

from splitserve.bench.peers.distserve_machine import CONTEXT_TOKEN_S, PROMPT_STEP_S, STEP_S, DistServeCluster
from splitserve.bench.studies.validate_distserve import two_to_one
from splitserve.traces.request import TraceRequest


def prompt_s(*lens: int) -> float:
    return PREFILL_S + sum(lens) * (TOKEN_S + CONTEXT_TOKEN_S) + PROMPT_STEP_S


def token_s(*contexts: int) -> float:
    return DECODE_S * (1 + len(contexts) / 100) + STEP_S + CONTEXT_TOKEN_S * sum(contexts)


def test_prompts_that_wait_are_joined_whole_and_answers_take_a_step_a_token() -> None:
    first, second, third = DistServeCluster(profile(), 1, 1).run(
        [TraceRequest(0.0, 100, 1), TraceRequest(0.01, 200, 1), TraceRequest(0.02, 300, 2)]
    )
    assert first.ttft_s == pytest.approx(prompt_s(100))
    assert first.e2e_s == pytest.approx(prompt_s(100) + token_s(100))
    assert second.ttft_s == pytest.approx(prompt_s(100) + prompt_s(200, 300) - 0.01)
    assert third.e2e_s - third.ttft_s == pytest.approx(token_s(200, 300) + token_s(301))
    assert third.tpot_s == pytest.approx((third.e2e_s - third.ttft_s) / 2)


def test_a_new_sequence_goes_to_the_shortest_line_not_to_the_idlest_worker() -> None:
    asked = DistServeCluster(profile(), 1, 2).run([TraceRequest(float(i), 100, 1000) for i in range(2)])
    alone = DistServeCluster(profile(), 1, 2).run([TraceRequest(0.0, 100, 1000)])
    assert asked[1].e2e_s > alone[0].e2e_s  # both run on the first worker, although the second is idle


def test_two_prefill_workers_for_one_decode_worker() -> None:
    found = two_to_one()
    assert found["best"] == "2P:1D"
    assert found["per_gpu"] == pytest.approx(10 / 3)
