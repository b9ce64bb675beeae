"""Movers move the right bytes to the right blocks, and nothing that is wrong ever reaches the pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import pytest
from support.kv_pools import (
    DEADLINE_S,
    LAYER_BYTES,
    NUM_BLOCKS,
    NUM_LAYERS,
    SECRET,
    empty_pool,
    filled_pool,
    until,
)
from support.shm_owner import shm_pair, start_owner

from splitserve.transport.errors import MoverError
from splitserve.transport.live_environment import ProcessIdentity
from splitserve.transport.messages.messages import Met
from splitserve.transport.movers.checksum import RunningChecksums, block_checksum, checksums
from splitserve.transport.movers.interface import Arrival, Pool, PutSource, PutTarget
from splitserve.transport.movers.opening import open_source, open_targets
from splitserve.transport.movers.tcp.target import TcpTarget
from splitserve.transport.process.host import advertised_address, host_identity


def test_an_answer_that_names_no_mover_leaves_as_it_is() -> None:
    targets = open_targets(("tcp",), empty_pool(), None, "tcp://127.0.0.1:*", "127.0.0.1", False)
    met = Met(worker_id="d0", incarnation=1)
    try:
        assert targets.complete(met, ("p0", 1)) is met
    finally:
        targets.close_all()


def zmq_target(stack: ExitStack) -> tuple[TcpTarget, Pool]:
    pool = empty_pool()
    target = TcpTarget("tcp://127.0.0.1:*", pool)
    stack.callback(target.close_all)
    return target, pool


def tcp_pair(stack: ExitStack, source_pool: Pool) -> tuple[TcpTarget, PutSource, Pool]:
    target, pool = zmq_target(stack)
    met = Met(
        worker_id="d0",
        incarnation=1,
        mover="tcp",
        num_blocks=NUM_BLOCKS,
        data_address=target.data_address("127.0.0.1"),
    )
    source = open_source(met, source_pool)
    stack.callback(source.close)
    return target, source, pool


@pytest.mark.parametrize("pair", [shm_pair, tcp_pair], ids=["shm", "tcp"])
@pytest.mark.parametrize("order", ["side by side", "scattered"])
def test_right_bytes_reach_the_right_blocks(
    stack: ExitStack, pair: Callable[[ExitStack, Pool], tuple[PutTarget, PutSource, Pool]], order: str
) -> None:
    source_pool = filled_pool()
    target, source, pool = pair(stack, source_pool)
    rng = np.random.default_rng(1)
    own = list(range(10, 50)) if order == "side by side" else rng.permutation(NUM_BLOCKS)[:40].tolist()
    peers = list(range(5, 45)) if order == "side by side" else rng.permutation(NUM_BLOCKS)[:40].tolist()
    positions = list(range(7, 47))
    target.open(9, SECRET, dict(zip(positions, peers, strict=True)))
    source.put(9, SECRET, list(zip(positions, own, peers, strict=True)))
    left: list[Arrival] = []
    arrived: list[Arrival] = []
    until(lambda: left.extend(source.poll()) or arrived.extend(target.poll(1)) or len(left) == 40)
    until(lambda: arrived.extend(target.poll(1)) or target.one_sided or len(arrived) == 40)
    assert sorted(left) == [(9, position) for position in positions]
    assert sorted(arrived) == ([] if target.one_sided else sorted(left))
    assert source.pending() == 0
    expected = empty_pool()
    expected[peers] = source_pool[own]
    assert np.array_equal(pool, expected)
    assert checksums(pool, peers) == checksums(source_pool, own)


@pytest.mark.parametrize("pair", [shm_pair, tcp_pair], ids=["shm", "tcp"])
@pytest.mark.parametrize("order", ["side by side", "scattered"])
def test_blocks_travel_layer_by_layer(
    stack: ExitStack, pair: Callable[[ExitStack, Pool], tuple[PutTarget, PutSource, Pool]], order: str
) -> None:
    """A block has arrived with its last layer, whatever the order; a slice touches its own layers only."""
    source_pool = filled_pool()
    target, source, pool = pair(stack, source_pool)
    own = (
        list(range(10, 50))
        if order == "side by side"
        else np.random.default_rng(1).permutation(NUM_BLOCKS)[:40].tolist()
    )
    items = [(position, block, block) for position, block in enumerate(own)]
    target.open(9, SECRET, dict(enumerate(own)))
    running = RunningChecksums(source_pool)
    arrived: list[Arrival] = []

    def layers_are_there(end: int) -> bool:
        source.poll()
        arrived.extend(target.poll(1))
        return np.array_equal(pool[own, :end], source_pool[own, :end])

    for put, (first_layer, num_layers) in enumerate([(0, 1), (1, 2), (3, None)], start=1):
        assert not pool[own, first_layer:].any()
        source.put(9, SECRET, items, first_layer, num_layers)
        running.add(own, first_layer, num_layers)
        until(partial(layers_are_there, first_layer + (num_layers or 1)))
        assert put == 3 or not arrived
    until(lambda: target.one_sided or len(arrived) == 40 or (layers_are_there(NUM_LAYERS) and False))
    assert sorted(arrived) == ([] if target.one_sided else [(9, position) for position in range(40)])
    assert running.of(own) == checksums(pool, own)


@pytest.mark.parametrize("pair", [shm_pair, tcp_pair], ids=["shm", "tcp"])
@pytest.mark.parametrize(
    ("first_layer", "num_layers"), [(-1, 1), (0, 0), (0, NUM_LAYERS + 1), (NUM_LAYERS, None), (3, 2)]
)
def test_layers_that_do_not_exist_are_an_error(
    stack: ExitStack,
    pair: Callable[[ExitStack, Pool], tuple[PutTarget, PutSource, Pool]],
    first_layer: int,
    num_layers: int | None,
) -> None:
    _, source, pool = pair(stack, filled_pool())
    with pytest.raises(MoverError, match=f"blocks have {NUM_LAYERS}"):
        source.put(1, SECRET, [(0, 0, 0)], first_layer, num_layers)
    assert not pool.any()


def test_running_checksums_refuse_layers_out_of_order() -> None:
    running = RunningChecksums(filled_pool(2))
    running.add([0, 1], 0, 2)
    with pytest.raises(AssertionError, match="out of order"):
        running.add([1], 3, 1)
    with pytest.raises(KeyError):
        running.of([0])
    running.add([0])
    assert running.of([0]) == [block_checksum(filled_pool(2)[0])]


def test_a_corrupt_byte_changes_the_checksum() -> None:
    block = filled_pool(1)[0]
    before = block_checksum(block)
    block[NUM_LAYERS // 2, LAYER_BYTES // 2] ^= 1
    assert block_checksum(block) != before


def test_this_host_is_itself_and_addresses_are_rewritten() -> None:
    assert host_identity() == host_identity()
    assert len(host_identity()) < 256
    assert advertised_address("tcp://0.0.0.0:51", "node-7") == "tcp://node-7:51"
    assert advertised_address("tcp://[::]:51", "fd00::1") == "tcp://[fd00::1]:51"


def test_a_process_is_alive_until_it_ends(stack: ExitStack) -> None:
    process, _ = start_owner(stack, 4096)
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    assert identity.alive()
    assert not ProcessIdentity(process.pid, identity.start_time - 1).alive(), "another process of the same id"
    process.send_signal(signal.SIGSTOP)
    assert identity.alive()
    process.kill()
    until(lambda: not identity.alive())  # a zombie: we have not waited for it yet
    process.wait(DEADLINE_S)
    assert not identity.alive()
    with suppress(ProcessLookupError):
        os.kill(process.pid, 0)
        pytest.skip("the process id was given to another process at once")
    assert ProcessIdentity.of(process.pid) is None
