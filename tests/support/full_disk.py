"""Waiting and requests of the tests of a full disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHAT = "/v1/chat/completions"


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)
