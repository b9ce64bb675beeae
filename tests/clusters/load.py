"""Streams without end against a cluster whose workers come and go: each answer must stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field

import httpx

NUM_STREAMS = 16
MAX_TOKENS = 256
TIMEOUT_S = 120.0


@dataclass
class Load:
    """Runs streams from ``with`` to its end. ``problems``: each that failed or differed."""

    url: str
    num_streams: int = NUM_STREAMS
    answers: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0

    def __enter__(self) -> Load:
        self._expected = [asyncio.run(self._alone(number)) for number in range(self.num_streams)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, object]:
        """Return the figures so far."""
        return {
            "streams at a time": self.num_streams,
            "answers": self.answers,
            "tokens": self.tokens,
            "lost or different": len(self.problems),
            "longest pause in seconds": round(self.longest_pause_s, 2),
        }

    async def _alone(self, number: int) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            return await self._answer(client, number)

    async def _run(self) -> None:
        async with httpx.AsyncClient(
            trust_env=False, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)
        ) as client:
            await asyncio.gather(
                *(self._again_and_again(client, number) for number in range(self.num_streams))
            )

    async def _again_and_again(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._stop.is_set():
            try:
                answer = await self._answer(client, number)
                if answer != self._expected[number]:
                    self.problems.append(f"stream {number}: {answer!r} is not {self._expected[number]!r}")
            except (httpx.HTTPError, ValueError) as error:
                self.problems.append(f"stream {number}: {error!r}")
                await asyncio.sleep(1)
            self.answers += 1

    async def _answer(self, client: httpx.AsyncClient, number: int) -> str:
        body = {
            "model": "splitserve-demo",
            "messages": [{"role": "user", "content": f"What does os.path.join do? Example {number}."}],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": number,
            "stream": True,
        }
        text, done, last = "", False, asyncio.get_running_loop().time()
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code}: {(await response.aread()).decode()[:200]}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ValueError(str(event["error"]))
                    with contextlib.suppress(IndexError):
                        text += event["choices"][0]["delta"].get("content") or ""
                    self.tokens += 1
                    now = asyncio.get_running_loop().time()
                    self.longest_pause_s, last = max(self.longest_pause_s, now - last), now
        if not done:
            raise ValueError(f"the stream ended after {len(text)} characters")
        return text
