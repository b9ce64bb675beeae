"""A mover that breaks in use, forced or not, between two real workers: what was under way is given back, and
tcp takes its place, with a warning and a count."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.worker_pair import WorkerPair, spec

from splitserve.transport.errors import MoverError
from splitserve.transport.messages.messages import Joined, Load, RequestFailed
from splitserve.transport.movers import nixl
from splitserve.transport.movers.nccl.sending import NcclSource
from splitserve.transport.movers.nixl import NixlSource
from splitserve.transport.movers.shm import ShmSource

WITHOUT_NIXL = pytest.mark.skipif(
    not nixl.is_installed(), reason="NIXL is not installed: pip install 'splitserve[nixl]'"
)
SOURCES: dict[str, Any] = {"auto": ShmSource, "shm": ShmSource, "nccl": NcclSource, "nixl": NixlSource}


@pytest.mark.parametrize("mover", ["auto", "shm", "nccl", pytest.param("nixl", marks=WITHOUT_NIXL)])
def test_zmq_takes_the_place_of_a_mover_that_breaks(
    mover: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole, left = SOURCES[mover].put, [1]

    def put(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise MoverError("broken by a test")
        whole(self, *arguments)

    monkeypatch.setattr(SOURCES[mover], "put", put)
    with WorkerPair(mover) as pair:

        def joined(dispatch: int) -> bool:
            return any(isinstance(m, Joined) and m.dispatch == dispatch for m in pair.received)

        pair.ask(spec(0))
        pair.until(lambda: joined(0))
        failures = 2 if mover == "nccl" else 1  # what two ends have set up together is made anew once
        for dispatch in range(1, failures + 1):
            pair.ask(spec(dispatch, request=1, epoch=dispatch))
            pair.until(lambda: sum(isinstance(m, RequestFailed) for m in pair.received) == dispatch)  # noqa: B023
        pair.ask(spec(9, request=1, epoch=9))
        pair.until(lambda: joined(9))
        pair.until(
            lambda: (
                [
                    m.counters["mover_fallbacks"]
                    for m in pair.received
                    if isinstance(m, Load) and m.worker_id == "p"
                ][-1]
                == 1
            )
        )
    failed = [m for m in pair.received if isinstance(m, RequestFailed)]
    assert {m.kind for m in failed} == {"peer_lost"}
    assert "the KV mover failed: broken by a test" in failed[-1].message
    logged = [record.message for record in caplog.records if "KV blocks to d" in record.message]
    assert logged[-2:] == [
        "cannot hand KV blocks to d: broken by a test; from now on by tcp",
        "hands KV blocks to d by tcp",
    ]
    assert sum("from now on" in line for line in logged) == 1
    name = "shm" if mover == "auto" else mover
    assert logged[0] == f"hands KV blocks to d by {name}"
