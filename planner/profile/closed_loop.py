"""What clients of one worker see that start together and ask again when answered: the load of most published
benchmarks. Pure.

The server's front takes requests one after another, and their lengths vary: so clients do not stay in step,
and few prompts share a step of the engine. A step is planned while the one before runs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from statistics import mean
from typing import NamedTuple

from ...engine.latency_profile import StepModel

WAVES = 10
"""Answers to each client, as InferenceMAX and AIConfigurator ask for; the first are asked for at once."""
REQUEST_S, FRONT_S, TOKEN_S = 0.015, 0.003, 3e-6
"""HTTP of a request; a server's front for a request, and for each token of its prompt, one after another."""
_TURN = 0.6180339887498949  # multiples of it spread evenly over 0 to 1


class Run(NamedTuple):
    """A benchmark: means over its requests; times in seconds."""

    prompt: float
    output: float
    clients: int
    ttft_s: float
    tpot_s: float


class Server(NamedTuple):
    """How an engine fills its steps.

    ``mixes``: a step takes prompts and tokens, else prompts go first; ``cuts``: prompts are cut to fill a
    step; ``spread``: lengths vary by this share of the mean, up and down; ``max_num_seqs``: requests that run
    at once."""

    step_tokens: int = 8192
    mixes: bool = True
    cuts: bool = True
    spread: float = 0.1
    max_num_seqs: int = 1 << 30


class _Request:
    """``left``: prompt tokens, then output tokens, that are still to be computed."""

    def __init__(self, asked: float, number: int, run: Run, spread: float) -> None:
        self.asked = asked
        self.prompt = float(round(run.prompt * (1 + spread * (2 * (number * _TURN % 1) - 1))))
        self.output = max(2, round(run.output * (1 + spread * (2 * (number * _TURN**2 % 1) - 1))))
        self.left, self.first = self.prompt, 0.0


USUAL = Server()


def closed_loop(
    prefill: StepModel, decode: StepModel, run: Run, server: Server = USUAL
) -> tuple[float, float]:
    """Return the mean TTFT and TPOT."""
    once, num_asked, front = min(prefill.base_s, decode.base_s), 0, 0.0
    coming, waiting = list[tuple[float, int, _Request]](), list[_Request]()
    running = list[tuple[int, int, _Request]]()  # by the step that ends them
    now, planned, step, context, ttft, tpot = 0.0, 0.0, 0, 0.0, list[float](), list[float]()

    def ask() -> None:
        nonlocal num_asked, front
        if num_asked < WAVES * run.clients:
            request = _Request(now, num_asked, run, server.spread)
            front = max(front, now + REQUEST_S) + FRONT_S + TOKEN_S * request.prompt
            heappush(coming, (front, num_asked, request))
            num_asked += 1

    for _ in range(run.clients):
        ask()
    while coming or waiting or running:
        if not waiting and not running:
            now = planned = max(now, coming[0][0])
        while coming and coming[0][0] <= planned:
            waiting.append(heappop(coming)[2])
        planned, num = now, len(running)
        begun = sum(asked.left < asked.prompt for asked in waiting)
        able = waiting[: max(begun, server.max_num_seqs - num)]
        chunks = _chunks(able, server, num if server.mixes else 0)
        if chunks:
            pairs = sum(new * (w.prompt - w.left) + new * (new + 1) / 2 for w, new in chunks)
            cached = sum(w.prompt - w.left for w, _ in chunks)
            now += prefill.seconds(sum(new for _, new in chunks), pairs, len(chunks), cached)
            if steps := int(server.mixes):
                now += decode.seconds(num, context, num) - once if num else 0.0
        else:
            steps = running[0][0] - step
            step_s = decode.seconds(num, context + num * (steps - 1) / 2, num)
            if coming:  # until a step after something arrives
                steps = min(steps, max(1, 1 - int((now - coming[0][0]) // step_s)))
            step_s = decode.seconds(num, context + num * (steps - 1) / 2, num)
            planned, now = now + (steps - 1) * step_s, now + steps * step_s
        step, context = step + steps, context + steps * num
        while running and running[0][0] <= step:
            ended = heappop(running)[2]
            context -= ended.prompt + ended.output
            tpot.append((now - ended.first) / (ended.output - 1))
            ask()
        for asked, new in chunks:
            asked.left -= new
            if asked.left <= 0:
                waiting.remove(asked)
                asked.first = now
                ttft.append(now - asked.asked)
                heappush(running, (step + asked.output - 1, len(ttft), asked))
                context += asked.prompt + 1
    return mean(ttft), mean(tpot)


def _chunks(waiting: list[_Request], server: Server, num_rows: int) -> list[tuple[_Request, float]]:
    """Return the prompts of the next step, each with its new tokens; at least one of those that wait."""
    room, chunks = max(1.0, float(server.step_tokens - num_rows)), list[tuple[_Request, float]]()
    for request in waiting:
        if room <= 0 or (chunks and not server.cuts and request.left > room):
            break
        chunks.append((request, min(room, request.left)))
        room -= chunks[-1][1]
    return chunks
