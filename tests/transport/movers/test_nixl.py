"""One-sided writes by NIXL over TCP: right bytes, errors instead of hangs, and a writer that has been
shut out writes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.kv_pools import DEADLINE_S, NUM_BLOCKS, NUM_LAYERS, SECRET, empty_pool, filled_pool, until

from splitserve.transport.errors import MoverError
from splitserve.transport.messages.messages import Met, PeerId
from splitserve.transport.movers import nixl
from splitserve.transport.movers.block_memory import DevicePool
from splitserve.transport.movers.interface import Arrival, Pool
from splitserve.transport.movers.nixl import NixlSource, NixlTarget
from splitserve.transport.movers.opening import open_source

pytestmark = pytest.mark.skipif(
    not nixl.is_installed(), reason="NIXL is not installed: pip install 'splitserve[nixl]'"
)
WRITER = ("p0", 1)

OWNER = """
import sys
from support.kv_pools import empty_pool
from splitserve.transport.movers.nixl import NixlTarget
target = NixlTarget(empty_pool())
print(target.address(("p0", 1)).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl, "PUT_S", 60.0)  # nobody is given up because the machine stood still


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_pair(stack: ExitStack, source_pool: Pool) -> tuple[NixlTarget, NixlSource, Pool]:
    pool = empty_pool()
    target = NixlTarget(pool)
    stack.callback(target.close_all)
    address = target.address(WRITER)
    assert address is not None
    source = open_source(
        Met(worker_id="d0", incarnation=1, mover="nixl", num_blocks=NUM_BLOCKS, mover_address=address),
        source_pool,
        True,
    )
    assert isinstance(source, NixlSource)
    stack.callback(source.close)
    return target, source, pool


def finish(source: NixlSource) -> list[Arrival]:
    """What leaves until nothing is under way."""
    left: list[Arrival] = []

    def all_left() -> bool:
        left.extend(source.poll())
        return not source.pending()

    until(all_left)
    return left


def test_blocks_and_layers_reach_their_places_and_no_other(stack: ExitStack) -> None:
    source_pool = filled_pool()
    _, source, pool = open_pair(stack, source_pool)
    expected = empty_pool()
    own, peers = [3, 4, 5, 20], [7, 8, 9, 0]
    source.put(9, SECRET, list(zip(range(4), own, peers, strict=True)))
    assert source.writing(9)
    assert not source.writing(8)
    assert sorted(finish(source)) == [(9, position) for position in range(4)]
    assert not source.writing(9)
    expected[peers] = source_pool[own]
    assert np.array_equal(pool, expected)
    for first, count in ((0, 1), (1, 2), (3, None)):
        source.put(9, SECRET, [(0, 30, 31), (1, 40, 33)], first, count)
        finish(source)
        end = NUM_LAYERS if count is None else first + count
        expected[[31, 33], first:end] = source_pool[[30, 40], first:end]
        assert np.array_equal(pool, expected)


@pytest.mark.parametrize("item", [(0, 0, NUM_BLOCKS), (0, NUM_BLOCKS, 0), (0, 0, -1), (0, -1, 0)])
def test_blocks_that_do_not_exist_are_an_error(stack: ExitStack, item: tuple[int, int, int]) -> None:
    _, source, pool = open_pair(stack, filled_pool())
    with pytest.raises(MoverError, match="pools of"):
        source.put(1, SECRET, [item])
    assert not pool.any()


def test_each_peer_gets_an_agent_of_its_own(stack: ExitStack) -> None:
    """The next spare is made whenever one has been taken."""
    target, _, _ = open_pair(stack, filled_pool())

    def address(peer: PeerId) -> bytes:
        found: list[bytes] = []
        until(lambda: found.extend(filter(None, [target.address(peer)])) or found)
        return found[0]

    addresses = {address((f"p{number}", 1)) for number in range(4)}
    assert len(addresses) == 4


def test_who_has_been_shut_out_writes_nothing_more_and_others_go_on(stack: ExitStack) -> None:
    target, source, pool = open_pair(stack, filled_pool())
    other: list[bytes] = []
    until(
        lambda: other.extend([a] if (a := target.address(("p1", 1))) is not None else []) or other
    )  # the next spare is ready
    beside = NixlSource(other[0], NUM_BLOCKS, filled_pool())
    stack.callback(beside.close)
    source.put(1, SECRET, [(0, 1, 1)])
    finish(source)
    until(lambda: target.shut_out(WRITER))
    assert target.shut_out(WRITER), "and again"
    pool[:] = 0

    def write() -> None:
        source.put(1, SECRET, [(0, 1, 1)])
        finish(source)

    with pytest.raises(MoverError, match="NIXL"):
        write()
    beside.put(2, SECRET, [(0, 2, 2)])
    finish(beside)
    assert pool[2].any()
    assert not pool[[0, 1, *range(3, NUM_BLOCKS)]].any()


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_peer_is_an_error(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, what: signal.Signals
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    source = NixlSource(bytes.fromhex(process.stdout.readline().split()[-1]), NUM_BLOCKS, filled_pool())
    stack.callback(source.close)
    source.put(1, SECRET, [(0, 1, 1)])
    finish(source)
    process.send_signal(what)
    if what == signal.SIGKILL:
        process.wait(DEADLINE_S)
    monkeypatch.setattr(nixl, "PUT_S", 0.3)

    def write() -> None:
        source.put(1, SECRET, [(0, 1, 1)])
        finish(source)

    with pytest.raises(MoverError, match="NIXL"):
        until(write)  # again and again: SIGSTOP takes a moment to reach every thread


@pytest.mark.parametrize("address", [b"", b"12345678", b"12345678" + b"no agent's metadata"])
def test_an_address_that_is_none_is_an_error(address: bytes) -> None:
    with pytest.raises(MoverError, match="address"):
        NixlSource(address, NUM_BLOCKS, filled_pool())


def test_it_is_used_only_where_blocks_may_travel_in_the_clear() -> None:
    with pytest.raises(MoverError, match="plaintext-kv"):
        open_source(
            Met(worker_id="d0", incarnation=1, mover="nixl", num_blocks=1, mover_address=b"x"), filled_pool()
        )


def test_who_could_not_be_shut_out_is_not_said_to_be(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks would be given to others while it may still write."""

    class Stubborn:
        def close(self) -> None:
            raise RuntimeError("the memory is in use")

    target, _, _ = open_pair(stack, filled_pool())
    target._agents[WRITER] = Stubborn()  # type: ignore[assignment]
    assert not target.shut_out(WRITER)
    target._ending[WRITER].join(DEADLINE_S)
    assert not target.shut_out(WRITER)
    assert target.address(WRITER) is None, "nor is it let in by another way"
    assert "the memory is in use" in caplog.text


@pytest.mark.parametrize("how", ["status", "exception"])
def test_a_put_that_fails_at_its_start_may_still_land(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Some of its runs may have left. The lease was released, and those landed in blocks of others."""
    _, source, _ = open_pair(stack, filled_pool())

    def transfer(handle: object) -> str:
        if how == "exception":
            raise RuntimeError("no route")
        return "ERR"

    monkeypatch.setattr(source._agent._nixl, "transfer", transfer)
    with pytest.raises(MoverError, match="NIXL cannot write to the decode worker"):
        source.put(9, SECRET, [(0, 1, 1), (1, 5, 7)])
    assert source.writing(9)


def test_the_end_of_a_role_waits_for_no_agent(stack: ExitStack) -> None:
    """The loop goes on in another role."""
    over, ended = threading.Event(), list[bool]()
    target, _, _ = open_pair(stack, filled_pool())
    target._agents["p9", 1] = SimpleNamespace(  # type: ignore[assignment]
        close=lambda: ended.append(over.wait(DEADLINE_S))
    )
    target.close_all()
    assert ended == []
    over.set()
    until(lambda: ended and target._spare is None)
    assert ended == [True]


def test_a_pool_on_a_gpu_is_registered_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[object, str]] = []
    asked: list[tuple[object, str]] = []

    class PlayedAgent:
        def __init__(self, name: str, config: object) -> None: ...

        def register_memory(self, descriptors: object, kind: str) -> object:
            registered.append((descriptors, kind))
            return "registered"

        def get_agent_metadata(self) -> bytes:
            return b"metadata"

        def add_remote_agent(self, metadata: bytes) -> str:
            assert metadata == b"metadata"
            return "peer"

        def get_xfer_descs(self, descriptors: object, kind: str) -> object:
            asked.append((descriptors, kind))
            return descriptors

        def initialize_xfer(self, *arguments: object) -> object:
            return SimpleNamespace(release=lambda: None)

        def transfer(self, handle: object) -> str:
            return "PROC"

        def deregister_memory(self, handle: object) -> None: ...

    def on_gpu(number: int, address: int) -> DevicePool:
        gpu = torch.device("cuda", number)
        shards = [(address, gpu, range(1))]
        pool: DevicePool = SimpleNamespace(  # type: ignore[assignment]
            shape=(4, 2, 16), shards=shards, device=gpu
        )
        return pool

    api = SimpleNamespace(nixl_agent=PlayedAgent, nixl_agent_config=lambda backends: None)
    monkeypatch.setattr(nixl.importlib, "import_module", lambda name: api)
    target = NixlTarget(on_gpu(3, 0x5000))
    source = NixlSource(target.address(WRITER) or b"", 4, on_gpu(1, 0x9000))
    assert ([(0x5000, 128, 3, "")], "VRAM") in registered
    assert ([(0x9000, 128, 1, "")], "VRAM") in registered
    source.put(1, SECRET, [(0, 2, 1)], 1)
    assert asked == [([(0x9000 + 2 * 32 + 16, 16, 1)], "VRAM"), ([(0x5000 + 32 + 16, 16, 3)], "VRAM")]
    source.close()
    target.close_all()
