"""Blocks between workers of any two numbers of GPUs, by each mover: each GPU ends with its heads of the
logical blocks, and nothing else."""

from __future__ import annotations

import itertools

import pytest
from support.kv_pools import SECRET, until
from support.played_gpu import played_gpu

from splitserve.bench.kernels import triton_interpreter

triton_interpreter.install()

from support.sharded_pools import Shards, logical_pool  # noqa: E402

from splitserve.transport.movers.interface import PutSource  # noqa: E402
from splitserve.transport.movers.tcp import inbound, source, target, wire  # noqa: E402
from splitserve.transport.movers.tcp.source import TcpSource  # noqa: E402
from splitserve.transport.movers.tcp.target import TcpTarget  # noqa: E402
from splitserve.transport.movers.tcp.wire import GCM, PLAIN  # noqa: E402

pytestmark = pytest.mark.timeout(120)
WRITER, LEASE = ("p0", 1), 9
OWN, PEERS = [4, 5, 6, 11, 0], [2, 3, 9, 8, 1]  # the first two are side by side in both
ALL_DEGREES = [*itertools.product((1, 2, 4), repeat=2)]
KINDS = [(2, 4), (2, 2), (1, 1)]
"""Planes and KV heads: as many as GPUs, fewer, and latent attention."""
PAIRS = pytest.mark.parametrize(
    ("planes", "heads", "of", "to"), [(*kind, *degrees) for kind in KINDS for degrees in ALL_DEGREES]
)


class Pair:
    """Both workers' pools. What was put is expected at the peer."""

    def __init__(self, planes: int, heads: int, of: int, to: int, on_gpus: bool = False) -> None:
        self.own = Shards(logical_pool(planes, heads), of, on_gpus)
        self.peer = Shards(logical_pool(planes, heads, seed=1), to, on_gpus)
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
def test_by_tcp(planes: int, heads: int, of: int, to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (wire, source, inbound, target):
        monkeypatch.setattr(module, "RECORD_BYTES", 1000)  # cut in the middle of a head
    mode = GCM if (of + to) % 3 else PLAIN
    with played_gpu(monkeypatch) as gpu:
        pair = Pair(planes, heads, of, to, on_gpus=True)
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
