"""Looking up the names of images' hosts, also while some of them do not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from threading import Event, enumerate
from typing import Any

import pytest

from splitserve.coordinator.images import resolving
from splitserve.coordinator.images.resolving import Resolver

ROW = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 80))


class Names:
    """Plays getaddrinfo: names that begin with "slow" are answered once ``may_end`` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_end = Event()

    def __call__(self, name: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(name)
        if name.startswith("slow"):
            assert self.may_end.wait(30)
        if name == "unknown":
            raise socket.gaierror(-2, "not known")
        return [ROW, ROW]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    yield names
    names.may_end.set()
    for thread in enumerate():
        if thread.name.startswith("look up"):
            thread.join(30)


async def test_names_that_hang_hold_up_no_other_and_no_thread_of_the_loop(names: Names) -> None:
    resolver = Resolver()
    hanging = [asyncio.create_task(resolver(f"slow{i}", 80)) for i in range(40)]
    async with asyncio.timeout(20):
        assert await resolver("quick", 80) == ["192.0.2.1"]
        await asyncio.to_thread(str)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert all(thread.daemon for thread in enumerate() if thread.name.startswith("look up"))


async def test_one_lookup_for_all_who_ask_for_a_name(names: Names) -> None:
    resolver = Resolver()
    first, second = (asyncio.create_task(resolver("slow", 80)) for _ in range(2))
    async with asyncio.timeout(20):
        while not names.asked:
            await asyncio.sleep(0.001)
        first.cancel()
        names.may_end.set()
        assert await second == ["192.0.2.1"]
    assert names.asked == ["slow"]
    assert await resolver("slow", 80)
    assert names.asked == ["slow", "slow"], "answers are not kept"
    with pytest.raises(OSError, match="not known"):
        await resolver("unknown", 80)


async def test_bounded_at_once(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "MAX_AT_ONCE", 2)
    resolver = Resolver()
    tasks = [asyncio.create_task(resolver(f"slow{i}", 80)) for i in range(5)]
    async with asyncio.timeout(20):
        while len(names.asked) < 2:
            await asyncio.sleep(0.001)
        tasks.pop().cancel()
        await asyncio.sleep(0)
        assert len(names.asked) == 2
        names.may_end.set()
        assert await asyncio.gather(*tasks) == [["192.0.2.1"]] * 4
    assert len(names.asked) == 4, "names that no request waits for are not looked up"
