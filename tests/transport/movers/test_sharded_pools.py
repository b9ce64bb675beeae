"""Blocks between workers of any two numbers of GPUs, by each mover: each GPU ends with its heads of the
logical blocks, and nothing else."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from support.kv_pools import SECRET, until
from support.played_gpu import PlayedGpu, played_gpu

from splitserve.bench.kernels import triton_interpreter

triton_interpreter.install()

from support.played_cuda import Cuda, Host  # noqa: E402
from support.sharded_pools import NUM_BLOCKS, Shards, logical_pool  # noqa: E402

from splitserve.transport.errors import MoverError  # noqa: E402
from splitserve.transport.movers import cuda_ipc, nixl, opening  # noqa: E402
from splitserve.transport.movers.cuda_ipc import CudaIpcSource, CudaIpcTarget  # noqa: E402
from splitserve.transport.movers.interface import PutSource  # noqa: E402
from splitserve.transport.movers.tcp import inbound, source, target, wire  # noqa: E402
from splitserve.transport.movers.tcp.source import TcpSource  # noqa: E402
from splitserve.transport.movers.tcp.target import TcpTarget  # noqa: E402
from splitserve.transport.movers.tcp.wire import GCM, PLAIN  # noqa: E402

pytestmark = pytest.mark.timeout(120)
WRITER, LEASE = ("p0", 1), 9
OWN, PEERS = [4, 5, 6, 11, 0], [2, 3, 9, 8, 1]  # the first two are side by side in both
ALL_DEGREES = [*itertools.product((1, 2, 4), repeat=2)]
KINDS = [(2, 4, False), (2, 2, False), (1, 1, False), (1, 1, True)]
"""Planes and KV heads: as many as GPUs, fewer, and latent attention, whose blocks may be spread."""
PAIRS = pytest.mark.parametrize(
    ("planes", "heads", "spread", "of", "to"),
    [(*kind, *degrees) for kind in KINDS for degrees in ALL_DEGREES],
)


class Pair:
    """Both workers' pools. What was put is expected at the peer."""

    def __init__(
        self, planes: int, heads: int, of: int, to: int, on_gpus: bool = False, spread: bool = False
    ) -> None:
        self.own = Shards(logical_pool(planes, heads), of, on_gpus, spread and of > 1)
        self.peer = Shards(logical_pool(planes, heads, seed=1), to, on_gpus, spread and to > 1)
        self.expected = self.peer.logical.copy()

    def put(self, source: PutSource) -> None:
        """Three blocks at once, the others a few layers at a time."""
        items = [*zip(range(5), OWN, PEERS, strict=True)]
        source.put(LEASE, SECRET, items[:3])
        source.put(LEASE, SECRET, items[3:], 0, 1)
        source.put(LEASE, SECRET, items[3:], 1)
        self.expected[PEERS] = self.own.logical[OWN]

    def check(self) -> None:
        assert self.peer.hold(self.expected)
        assert self.own.hold(self.own.logical)
        assert self.peer.blocks.checksums(PEERS) == self.own.blocks.checksums(OWN)


@PAIRS
def test_by_tcp(
    planes: int, heads: int, spread: bool, of: int, to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (wire, source, inbound, target):
        monkeypatch.setattr(module, "RECORD_BYTES", 1000)  # cut in the middle of a head
    mode = GCM if (of + to) % 3 else PLAIN
    with played_gpu(monkeypatch) as gpu:
        pair = Pair(planes, heads, of, to, on_gpus=True, spread=spread)
        gpu.beside_steps = True
        receiving = TcpTarget("tcp://127.0.0.1:*", pair.peer.blocks, takes_plain=True)
        sending = TcpSource(receiving.data_address("127.0.0.1"), pair.own.blocks, mode == PLAIN, mode or None)
        receiving.open(LEASE, SECRET, dict(enumerate(PEERS)))
        pair.put(sending)
        arrived: list[object] = []
        until(lambda: (sending.poll() and False) or arrived.extend(receiving.poll(9)) or len(arrived) == 5)
        sending.close()
        receiving.close_all()
        assert not receiving.dropped
        gpu.beside_steps = False
        pair.check()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedGpu]:
    with played_gpu(monkeypatch) as gpu:
        yield gpu


@PAIRS
def test_by_cuda_ipc(gpu: PlayedGpu, planes: int, heads: int, spread: bool, of: int, to: int) -> None:
    pair = Pair(planes, heads, of, to, on_gpus=True, spread=spread)
    host = Host(pair.own, pair.peer)
    receiving = CudaIpcTarget(pair.peer.blocks, host.runtime)
    sending = CudaIpcSource(receiving.address(WRITER), NUM_BLOCKS, pair.own.blocks, host.runtime)
    pair.put(sending)
    assert sending.pending() == len(OWN) + 2
    assert pair.peer.hold(pair.peer.logical), "nothing waits for a copy"
    left: list[object] = []
    until(lambda: left.extend(sending.poll()) or not sending.pending())
    assert len(left) == len(OWN) + 2
    sending.close()
    assert host.num_mapped == 0
    pair.check()
    if not spread:
        copies = 6 * num_lanes(heads, of, to)
        assert host.num_copies == copies, "one for each run of blocks, and pair of GPUs"
    elif of > 1 or to > 1:
        assert host.num_copies == 7, "one a block and put: none lie side by side on both workers"


def num_lanes(heads: int, of: int, to: int) -> int:
    """How many pairs of GPUs have heads in common, each head read from one GPU only."""
    of = min(of, heads)
    return max(of, to)


@pytest.mark.parametrize(("of", "to"), ALL_DEGREES[1:])
def test_by_nccl(of: int, to: int) -> None:
    """Gloo plays it, between tensors of the CPU."""
    pair = Pair(2, 4, of, to)
    receiving = opening.nccl_target(pair.peer.blocks, pair.peer.blocks.shape)
    sending = opening.nccl_source(receiving.address(WRITER), pair.own.blocks, pair.own.blocks.shape)
    receiving.open(LEASE, SECRET, dict(enumerate(PEERS)))
    pair.put(sending)
    arrived: list[object] = []

    def turn() -> bool:
        for message in sending.take_messages():
            receiving.receive(WRITER, message)
        for _, message in receiving.take_messages():
            sending.receive(message)
        sending.poll()
        arrived.extend(receiving.poll(9))
        return len(arrived) == len(PEERS)

    until(turn)
    sending.close()
    receiving.close_all()
    pair.check()


def test_a_worker_of_one_gpu_shares_it_by_the_address_of_before(gpu: PlayedGpu) -> None:
    pair = Pair(2, 4, 2, 1, on_gpus=True)
    address = CudaIpcTarget(pair.peer.blocks, Host(pair.own, pair.peer).runtime).address(WRITER)
    pointer = pair.peer.parts[0].data_ptr() - Cuda.OFFSET
    assert address == pointer.to_bytes(64, "little") + Cuda.OFFSET.to_bytes(
        8, "little"
    ) + os.getpid().to_bytes(4, "little")


def sharded_address(planes: int, num_heads: int, *heads: tuple[int, int]) -> bytes:
    return cuda_ipc._SHARDED.pack(os.getpid(), planes, num_heads) + b"".join(
        cuda_ipc._SHARD.pack(b"h", 0, first, count) for first, count in heads
    )


GOOD = sharded_address(2, 4, (0, 2), (2, 2))
SPREAD = sharded_address(0, 0, (0, 1), (0, 1))


@pytest.mark.parametrize("of", [1, 2, 4])
@pytest.mark.parametrize(
    "address",
    [
        GOOD[:-1],
        GOOD + b"h",
        GOOD[:8],
        sharded_address(2, 4, (0, 2)),
        sharded_address(2, 4, (0, 1), (2, 2)),
        sharded_address(2, 4, (0, 2), (2, 3)),
        sharded_address(2, 4, (2, 2), (0, 2)),
        sharded_address(2, 4, (0, 4), (0, 0)),
        sharded_address(2, 0, (0, 4)),
        sharded_address(0, 4, (0, 4)),
        sharded_address(2, 3, (0, 1), (1, 2)),
        sharded_address(2, 60_000, *[(0, 60_000)] * 800),
    ],
    ids=lambda address: f"{len(address)} bytes",
)
def test_an_address_of_other_shards_is_an_error(gpu: PlayedGpu, of: int, address: bytes) -> None:
    pair = Pair(2, 4, of, 2, on_gpus=True)
    host = Host(pair.own, pair.peer)
    CudaIpcSource(GOOD, NUM_BLOCKS, pair.own.blocks, host.runtime).close()
    with pytest.raises(MoverError, match="share"):
        CudaIpcSource(address, NUM_BLOCKS, pair.own.blocks, host.runtime)
    assert host.num_mapped == 0


@pytest.mark.parametrize("of", [2, 4])
def test_an_address_of_spread_blocks_is_an_error_where_heads_are_split(gpu: PlayedGpu, of: int) -> None:
    pair = Pair(2, 4, of, 2, on_gpus=True)
    with pytest.raises(MoverError, match="share"):
        CudaIpcSource(SPREAD, NUM_BLOCKS, pair.own.blocks, Host(pair.own, pair.peer).runtime)


@pytest.mark.parametrize(
    "address",
    [GOOD, sharded_address(1, 2, (0, 1), (1, 1)), sharded_address(0, 0, (0, 1), (1, 1))],
    ids=["4 heads", "2 heads", "heads of spread blocks"],
)
def test_an_address_of_more_heads_than_there_are_is_an_error(gpu: PlayedGpu, address: bytes) -> None:
    pair = Pair(1, 1, 2, 2, on_gpus=True)
    with pytest.raises(MoverError, match="share"):
        CudaIpcSource(address, NUM_BLOCKS, pair.own.blocks, Host(pair.own, pair.peer).runtime)


def test_a_pool_that_cannot_be_mapped_leaves_none_mapped(
    gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(2, 4, 1, 4, on_gpus=True)
    host = Host(pair.own, pair.peer)
    address = CudaIpcTarget(pair.peer.blocks, host.runtime).address(WRITER)
    mapped = Cuda.map

    def fails(cuda: Cuda, handle: bytes) -> int:
        if host.num_mapped == 2:
            raise MoverError("cudaIpcOpenMemHandle: peer access is not supported")
        return mapped(cuda, handle)

    monkeypatch.setattr(Cuda, "map", fails)
    with pytest.raises(MoverError, match="peer access"):
        CudaIpcSource(address, NUM_BLOCKS, pair.own.blocks, host.runtime)
    assert host.num_mapped == 0


def test_nixl_is_left_out_and_named_as_the_reason_where_it_is_forced(
    gpu: PlayedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pair(2, 4, 2, 1, on_gpus=True).own.blocks

    def movers(*offered: str) -> tuple[str, ...]:
        targets = opening.open_targets(offered, pool, None, "tcp://127.0.0.1:*", "127.0.0.1", True)
        targets.close_all()
        return targets.endpoints.movers

    assert movers("nixl", "tcp") == ("tcp",)
    assert "goes on without the mover nixl: the mover nixl is for KV caches on one GPU" in caplog.text
    with pytest.raises(MoverError, match="on one GPU"):
        movers("nixl")
    with pytest.raises(MoverError, match="on one GPU"):
        nixl.NixlSource(bytes(99), NUM_BLOCKS, pool)
