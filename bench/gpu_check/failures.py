"""Workers that are killed or change their roles while streams run, in exact mode: every stream must give the
tokens that it gives undisturbed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import httpx
import psutil

from ..live_cluster import live_cluster
from ..operator_auth import OperatorAuth
from .correctness import interpret
from .line import Line, Place
from .machine import model_folder
from .parity import greedy
from .serving import common_options, drawn_prompts, one_process

NUM_WORKERS = 3
POLL_S = 0.01
UNDER_WAY = 5  # tokens of each stream before anything happens


def failures(place: Place) -> Iterator[Line]:
    """The tokens of one process; kill -9 of a decode and of the prefill worker; a flip there and back."""
    interpret(place)
    lengths, tokens, alone = ((40, 900, 2100, 64), 500, 64) if place.big else ((4, 20), 400, 2)
    folder = model_folder(place, "served")
    prompts = drawn_prompts(lengths, 300)
    expected = greedy(one_process(place, folder, exact=True), prompts[0], alone)[1] if place.big else None
    options = [*common_options(place, folder), "--flexible", "--prefill", "1", "--decode", "2"]
    # a rehearsal without the C++ kernels
    options += ["--exact"] if place.big or find_spec("splitserve.kernels._cpu") else ["--dtype", "float32"]
    options += ["--decode-max-num-seqs", "16", *(["--mover", "cuda_ipc"] if place.big else [])]
    with live_cluster(options, place.work / "logs" / "failures cluster.log") as url:
        lines = _all(url, prompts, tokens, expected)
        with asyncio.Runner() as runner:
            while (line := runner.run(_next(lines))) is not None:
                yield line


async def _next(lines: AsyncIterator[Line]) -> Line | None:
    return await anext(lines, None)


async def _all(
    url: str, prompts: list[list[int]], tokens: int, expected: list[int] | None
) -> AsyncIterator[Line]:
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, auth=OperatorAuth()) as http:
        cluster = Cluster(http, prompts, tokens)
        await cluster.whole()
        undisturbed = await cluster.answers()
        yield Line(
            "undisturbed streams", good=all(len(ids) == tokens for ids in undisturbed), note=cluster.note
        )
        if expected is not None:
            same = undisturbed[0][: len(expected)] == expected
            yield Line(f"exact: {len(expected)} tokens are those of one process", good=same)

        for role in ("decode", "prefill"):
            answers = await cluster.answers(partial(cluster.kill, role))
            what = f"streams go on unchanged: kill -9 of a {role} worker"
            yield Line(what, good=answers == undisturbed, note=cluster.note)
        await cluster.whole()
        for role in ("prefill", "decode"):
            answers = await cluster.answers(partial(cluster.flip, role))
            what = f"streams go on unchanged: a worker becomes a {role} worker"
            yield Line(what, good=answers == undisturbed, note=cluster.note)
        yield Line(
            "the same tokens afterwards", good=await cluster.answers() == undisturbed, note=cluster.note
        )


@dataclass
class Cluster:
    http: httpx.AsyncClient
    prompts: list[list[int]]
    tokens: int
    note: str = field(default="", init=False)

    async def answers(self, act: Callable[[], Awaitable[str]] | None = None) -> list[list[int]]:
        """Token ids of all prompts at once; ``act`` is called when all are under way."""
        found: list[list[int]] = [[] for _ in self.prompts]
        streams = [
            asyncio.create_task(self._stream(prompt, ids))
            for prompt, ids in zip(self.prompts, found, strict=True)
        ]
        self.note = ""
        if act is not None:
            while any(len(ids) < UNDER_WAY for ids in found) and not any(task.done() for task in streams):
                await asyncio.sleep(POLL_S)
            self.note = await act()
        for number, ended in enumerate(await asyncio.gather(*streams, return_exceptions=True)):
            if isinstance(ended, BaseException):
                self.note += f"; stream {number} after {len(found[number])} tokens: {ended!r}"
        return found

    async def kill(self, role: str) -> str:
        worker = await self._newest(role)
        os.kill(int(worker["pid"]), signal.SIGKILL)
        return f"{worker['process']} killed"

    async def flip(self, role: str) -> str:
        """The newest worker of the other role takes this one, when nothing of a flip before is left."""
        while any(before["ended_s"] is None for before in (await self._state())["flips"]):
            await asyncio.sleep(POLL_S)
        worker = await self._newest("decode" if role == "prefill" else "prefill")
        answer = await self.http.post(f"/admin/flip/{worker['process']}", params={"to": role})
        if answer.is_error:
            raise RuntimeError(f"{worker['process']} did not become a {role} worker: {answer.text}")
        while (began := (await self._state())["flips"][-1]["began_s"]) is None:
            await asyncio.sleep(POLL_S)
        return f"{worker['process']} began after {began:.2f} s"

    async def _newest(self, role: str) -> dict[str, Any]:
        workers = [w for w in (await self._state())["workers"] if w["role"] == role and not w["draining"]]
        return max(workers, key=lambda worker: int(worker["incarnation"]))

    async def whole(self) -> None:
        """Wait until every worker is there and serves."""
        while True:
            state = await self._state()
            alive = [worker for worker in state["workers"] if psutil.pid_exists(int(worker["pid"]))]
            if state["coordinator"]["ready"] and len(state["workers"]) == len(alive) == NUM_WORKERS:
                return
            await asyncio.sleep(POLL_S)

    async def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self.http.get("/debug/state")).json()
        return state

    async def _stream(self, prompt: list[int], ids: list[int]) -> None:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for text in answer.aiter_lines():
                if text.startswith("data: {"):
                    event = json.loads(text.removeprefix("data: "))
                    if event.get("error"):
                        raise RuntimeError(str(event["error"]))
                    for choice in event["choices"]:
                        ids += choice.get("token_ids") or []
