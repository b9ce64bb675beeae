"""What clients of one worker see that start together and ask again when answered: the load of most published
benchmarks. Pure."""

from __future__ import annotations

from statistics import mean
from typing import NamedTuple

from ...engine.latency_profile import StepModel

WAVES = 5
"""Answers to each client."""


class Run(NamedTuple):
    """A benchmark: means over its requests; times in seconds."""

    prompt: int
    output: int
    clients: int
    ttft_s: float
    tpot_s: float


def closed_loop(
    prefill: StepModel, decode: StepModel, run: Run, step_tokens: int = 8192, mixes: bool = True
) -> tuple[float, float]:
    """Mean TTFT and TPOT. ``mixes``: a step takes prompts and tokens; else prompts go first."""
    _, output, clients, *_ = run
    prompt, once = float(run.prompt), min(prefill.base_s, decode.base_s)
    now, waiting, running = 0.0, [[0.0, 0.0] for _ in range(clients)], list[list[float]]()
    ttft, tpot = list[float](), list[float]()
    while len(tpot) < WAVES * clients:
        chunks, context = list[tuple[list[float], float]](), sum(r[1] for r in running)
        room = max(1.0, step_tokens - len(running))
        while waiting and room > 0:
            new = min(room, prompt - waiting[0][1])
            chunks.append((waiting[0], new))
            room -= new
            if new < prompt - waiting[0][1]:
                break
            waiting.pop(0)
        steps = 1 if mixes or not chunks else 0
        decode_s = decode.seconds(len(running), context, len(running)) if running and steps else 0.0
        if chunks:
            pairs = sum(new * w[1] + new * (new + 1) / 2 for w, new in chunks)
            cached = sum(w[1] for w, _ in chunks)
            now += prefill.seconds(sum(new for _, new in chunks), pairs, len(chunks), cached)
            now += decode_s - once if decode_s else 0.0
        else:
            steps = int(min(r[2] for r in running))
            context += len(running) * (steps - 1) / 2
            now += steps * decode.seconds(len(running), context, len(running))
        for sequence in running:
            sequence[1] += steps
            sequence[2] -= steps
        for ended in [r for r in running if r[2] <= 0]:
            running.remove(ended)
            tpot.append((now - ended[0]) / (output - 1))
            waiting.append([now, 0.0])
        for asked, new in chunks:
            asked[1] += new
            if asked[1] >= prompt:
                ttft.append(now - asked[0])
                running.append([now, prompt + 1, output - 1.0])
    return mean(ttft), mean(tpot)
