"""The chaos run's clients: every stream asks something whose answer is known, and notes when each piece
came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from ...cli.settings import DEMO_MODEL_NAME

RETRY_S = 0.5
NO_ANSWER_S = 180.0
STOP_CHARACTERS = 12
QUESTIONS = (
    "def join(path, *paths):\n",
    "import os\n\nclass Reader:\n    def __init__(self, name):\n",
    "What does os.path.join do?",
    "for i in range(10):\n    print(",
    "# A list of the first primes\nprimes = [",
    "try:\n    value = int(text)\nexcept ValueError as error:\n",
)

Answer: TypeAlias = list[tuple[str, str, list[tuple[str, float]]]]
"""By choice: text, finish reason, tokens with their logprobs where those were asked for."""


@dataclass(slots=True, eq=False)
class Stream:
    """One streamed answer as its client saw it."""

    question: int
    request_id: str = ""
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)
    # (token, its logprob), where asked for
    logprobs: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    arrivals: dict[int, list[float]] = field(default_factory=dict)  # by choice, monotonic seconds
    error: str = ""
    done: bool = False

    @property
    def answer(self) -> Answer:
        return [
            (self.texts[i], self.reasons.get(i, ""), self.logprobs.get(i, [])) for i in sorted(self.texts)
        ]


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Request bodies: greedy and seeded, short and long prompts, with penalties, with several choices, with
    logprobs."""
    draw = random.Random(seed)
    bodies = []
    for number in range(count):
        prompt = "".join(draw.choice(QUESTIONS) for _ in range(draw.choice([1, 2, 4, 12])))
        body: dict[str, Any] = {
            "model": DEMO_MODEL_NAME,
            "prompt": f"# {number}\n{prompt}",
            "max_tokens": draw.randint(60, 400),
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        if number % 3 == 1:
            body |= {"temperature": 0.9, "seed": number}
        if number % 8 == 2:
            body["logprobs"] = 2
        if number % 4 == 3:
            body |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
        if number % 8 == 5:
            body |= {"n": 2, "seed": number, "temperature": 0.7}
        bodies.append(body)
    return bodies


def with_stop_strings(
    bodies: list[dict[str, Any]], answers: dict[int, Answer]
) -> tuple[list[dict[str, Any]], dict[int, Answer]]:
    """Some of the questions with a stop string from late in their answers, and what is right then: all before
    the first place of it."""
    bodies, answers = list(bodies), dict(answers)
    for number in range(6, len(bodies), 8):
        ((text, _, _),) = answers[number]
        stop = text[len(text) * 2 // 3 :][:STOP_CHARACTERS]
        bodies[number] = {**bodies[number], "stop": [stop]}
        answers[number] = [(text[: text.index(stop)], "stop", [])]
    return bodies, answers


class Clients:
    """``concurrency`` streams at any time, until stopped."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], concurrency: int) -> None:
        self._url, self._bodies, self._concurrency = url, bodies, concurrency
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        self._http = httpx.AsyncClient(timeout=NO_ANSWER_S, limits=limits, trust_env=False)
        self.open: set[Stream] = set()
        self.ended: list[Stream] = []
        self.counts: Counter[str] = Counter()
        self._next = 0

    async def run(self, until: asyncio.Event, most: int | None = None) -> None:
        """Streams until the event, or until ``most`` have ended; those under way are read to their end."""

        async def client() -> None:
            while not until.is_set() and (most is None or self._next < most):
                number, self._next = self._next % len(self._bodies), self._next + 1
                await self._ask(number)

        await asyncio.gather(*(client() for _ in range(self._concurrency)))

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, number: int) -> None:
        """One stream. A request that is refused (503, 429) is sent again after the answer's Retry-After."""
        while True:
            stream = Stream(number)
            self.open.add(stream)
            try:
                if await self._read(stream):
                    break
            except httpx.HTTPError as error:
                stream.error = f"{type(error).__name__}: {error}"
                break
            finally:
                self.open.discard(stream)
            self.counts["refused"] += 1
            await asyncio.sleep(RETRY_S)
        self.ended.append(stream)

    async def _read(self, stream: Stream) -> bool:
        """False where it was refused."""
        async with self._http.stream(
            "POST", f"{self._url}/v1/completions", json=self._bodies[stream.question]
        ) as response:
            if response.status_code in (429, 503):
                return False
            if response.status_code != 200:
                stream.error = (await response.aread()).decode(errors="replace")[:300]
                return True
            stream.request_id = response.headers["x-request-id"]
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self._piece(stream, line[6:])
        if not stream.done and not stream.error:
            stream.error = "the stream ended without [DONE]"
        return True

    def _piece(self, stream: Stream, data: str) -> None:
        if data == "[DONE]":
            stream.done = True
            return
        event = json.loads(data)
        if "error" in event:
            stream.error = event["error"]["message"]
            return
        now = time.monotonic()
        for choice in event["choices"]:
            index = choice["index"]
            stream.arrivals.setdefault(index, []).append(now)
            stream.texts[index] = stream.texts.get(index, "") + choice["text"]
            if logprobs := choice.get("logprobs"):
                stream.logprobs.setdefault(index, []).extend(
                    zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                )
            if choice["finish_reason"]:
                stream.reasons[index] = choice["finish_reason"]
