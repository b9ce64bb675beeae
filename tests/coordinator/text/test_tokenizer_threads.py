"""The threads of a tokenizer are there before the first request needs one."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.http_fakes import byte_level_tokenizer

from splitserve.coordinator.text.tokenizer import Tokenizer


async def test_no_thread_is_started_once_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    tokenizer.start_threads()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread is started"))
    released = threading.Event()
    held = [tokenizer.aside(released.wait) for _ in range(tokenizer.num_threads)]
    released.set()
    assert await asyncio.gather(*held) == [True] * tokenizer.num_threads
    tokenizer.close()
