"""Streams with idempotency keys, again and again: what one coordinator breaks off, another goes on with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import httpx

from splitserve.cli.settings import DEMO_MODEL_NAME

NUM_STREAMS, MAX_TOKENS = 32, 200


class Streams:
    """Clients: each goes on with its answer at the other coordinator where one breaks off."""

    def __init__(self, urls: list[str]) -> None:
        self._urls, self._expected = urls, dict[int, str]()
        self._http = httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None))
        self.stop = asyncio.Event()
        self.counts = {"answers": 0, "different": 0, "broken off": 0, "resumed in mid-answer": 0}
        self.act = ""  # what is done meanwhile
        self.longest: dict[str, float] = {}  # pause, by the act in which it ended
        self.problems: list[str] = []

    async def expect(self) -> None:
        """Ask for each answer once, undisturbed."""
        for number in range(NUM_STREAMS):
            self._expected[number] = await self._answer(number, f"undisturbed-{number}")

    async def run(self) -> None:
        await asyncio.gather(*map(self._again_and_again, range(NUM_STREAMS)))
        await self._http.aclose()

    async def _again_and_again(self, number: int) -> None:
        turn = 0
        while not self.stop.is_set():
            answer, turn = await self._answer(number, f"{number}-{turn}"), turn + 1
            self.counts["answers"] += 1
            if answer != self._expected[number]:
                self.counts["different"] += 1
                self.problems.append(f"{number}: {answer!r} is not {self._expected[number]!r}")

    async def _answer(self, number: int, key: str) -> str:
        body = {
            "model": DEMO_MODEL_NAME,
            "prompt": f"# {number}\ndef join(path, *paths):\n",
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": number,
            "stream": True,
        }
        text, last_id, last, place = "", "", time.monotonic(), number
        while True:
            headers = {"idempotency-key": key} | ({"last-event-id": last_id} if last_id else {})
            url = f"{self._urls[place % len(self._urls)]}/v1/completions"
            with contextlib.suppress(httpx.TransportError):
                async with self._http.stream("POST", url, json=body, headers=headers) as response:
                    if response.status_code not in (200, 503):
                        raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
                    event_id = ""
                    async for line in response.aiter_lines():
                        if line.startswith("id: "):
                            event_id = line[4:]
                        elif line.startswith('data: {"error"'):
                            break
                        elif line.startswith("data: {") and event_id:  # docs/api.md: no id, no text
                            text += json.loads(line[6:])["choices"][0]["text"]
                            last_id, event_id = event_id, ""
                            pause, last = time.monotonic() - last, time.monotonic()
                            self.longest[self.act] = max(self.longest.get(self.act, 0.0), pause)
                        elif line == "data: [DONE]":
                            return text
            self.counts["broken off"] += 1
            self.counts["resumed in mid-answer"] += bool(last_id)
            place += 1
            await asyncio.sleep(0.2)
