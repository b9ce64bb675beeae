"""The imitation of splitwise-sim, on values of its measurements (llama2-70b on H100s), against what can be
added up."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.bench.studies.splitwise_clock import Clock
from splitserve.bench.studies.splitwise_cluster import Imitation
from splitserve.bench.studies.splitwise_machine import Job, LlmShape, Machine, Work
from splitserve.engine.latency_profile import Piece, StepModel
from splitserve.traces.request import Trace, TraceRequest

SHAPE = LlmShape(135e9, 8192, 80)
PROMPT = StepModel(pieces=(Piece(curve=((512.0, 0.0539), (1024.0, 0.077684), (2048.0, 0.134434))),))
TOKEN = StepModel(pieces=(Piece(curve=((128.0, 0.03), (512.0, 0.0306))),))
NUM_BYTES_PER_TOKEN = 2 * 8192 * 80 * 2


def machine(clock: Clock) -> Machine:
    return Machine(clock, SHAPE, PROMPT, TOKEN, "all", lambda _: None)


def submit(clock: Clock, on: Machine, number: int, at: float, prompt: int, output: int) -> Job:
    job = Job(number, at, prompt, output)

    def done() -> None:
        job.e2e = clock.now - job.arrival

    def arrive() -> None:
        on.arrive(Work(job, True, SHAPE.kv_bytes(prompt + 1), 1))
        on.arrive(Work(job, False, SHAPE.kv_bytes(output - 1), output - 1, after=done))

    clock.after(at, arrive)
    return job


def token_s(num_seqs: int) -> float:
    return TOKEN.seconds(num_seqs, 0, 1)


def test_one_request_alone() -> None:
    clock = Clock()
    job = submit(clock, machine(clock), 0, 1.0, 1024, 128)
    clock.run()
    assert job.ttft == pytest.approx(0.077684, abs=1e-9)
    assert job.e2e == pytest.approx(0.077684 + 127 * token_s(1), abs=1e-9)


def test_prompts_that_arrive_in_an_iteration_share_the_next_one() -> None:
    clock = Clock()
    on = machine(clock)
    jobs = [submit(clock, on, i, 1.0 + 0.01 * i, 1024, 3) for i in range(3)]
    clock.run()
    assert jobs[0].ttft == pytest.approx(0.077684)
    assert jobs[1].ttft == pytest.approx(
        0.077684 + PROMPT.seconds(2048, 0, 1) - 0.01
    )  # both: 2048 tokens; the first one's tokens wait
    assert jobs[2].ttft == pytest.approx(jobs[1].ttft - 0.01)


def test_a_prompt_interrupts_contiguous_iterations_at_a_boundary_and_costs_a_tenth_more() -> None:
    clock = Clock()
    on = machine(clock)
    first = submit(clock, on, 0, 1.0, 1024, 100)
    second = submit(clock, on, 1, 2.0, 1000, 2)
    clock.run()
    began = 1.077684
    iterations = (2.0 - began) // token_s(1) + 1
    mixed = 1.1 * PROMPT.seconds(1001, 0, 1)
    assert second.ttft == pytest.approx(began + iterations * token_s(1) + mixed - 2.0)
    left = 99 - iterations - 1 - 1
    assert first.e2e == pytest.approx(
        began - 1.0 + iterations * token_s(1) + mixed + token_s(2) + left * token_s(1)
    )


def test_a_long_answer_waits_for_memory_that_is_reserved_whole() -> None:
    clock = Clock()
    on = machine(clock)
    tokens = int((8 * 80 * (1 << 30) - SHAPE.weight_bytes) / NUM_BYTES_PER_TOKEN)
    first = submit(clock, on, 0, 1.0, 1024, tokens - 1024 - 600)
    second = submit(clock, on, 1, 1.5, 512, 200)
    clock.run()
    assert second.decode_began > first.e2e + 1.0 - 1e-9 > second.ttft + 1.5


def test_transfers_that_wait_for_each_other_for_ever_end_the_run(tmp_path: Path) -> None:
    """Requests are then missing from the results, and the percentiles do not show it, as in splitwise-sim."""
    measured = tmp_path / "perf_model.csv"
    rows = [f"llama2-70b,h100-80gb,{tokens},1,128,{tokens / 10},30,8" for tokens in (128, 512, 2048)]
    measured.write_text(
        "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
        + "\n".join(rows)
    )
    room = int((8 * 80 * (1 << 30) - SHAPE.weight_bytes) / NUM_BYTES_PER_TOKEN)
    asked = [TraceRequest(1.0, 1024, 8), TraceRequest(1.1, 1024, room + 10), TraceRequest(1.2, 1024, 8)]
    done = Imitation(measured, "llama2-70b", "Splitwise-HH", 1, 1).run(Trace("never", lambda: iter(asked)))
    assert [job.number for job in done if job.num_output_tokens == 8] == [0, 2]
    assert 1 not in [job.number for job in done]
