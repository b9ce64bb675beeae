"""Requests go to workers that fit together; those that fit none keep no request out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.lifecycle_bench import MODEL, Bench, sent

from splitserve.coordinator.lifecycle.actions import Send
from splitserve.coordinator.socket_dispatcher import system_snapshot
from splitserve.transport.messages.messages import Alive, OtherVersion, Prefill


def test_a_worker_of_another_version_keeps_no_request_out() -> None:
    bench = Bench()
    bench.core.receive(("old", 1), OtherVersion(), bench.now)
    assert list(bench.core.refused(bench.now)) == ["old"]
    assert sent(bench.submit(), Prefill)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_prompt_goes_only_where_its_blocks_fit_or_stay(mixed: bool) -> None:
    """Two workers of each role, of two block sizes; or two processes that keep what they compute."""
    bench = Bench()
    for name in ("p", "d"):
        bench.core.pools.remove(bench.core.pools.workers[name, 1], "gone")
    for number, block_size in enumerate((4, 4 if mixed else 8)):
        model = replace(MODEL, block_size=block_size)
        for role in ("prefill", "decode"):
            process = f"w{number}" if mixed else ""
            bench.hello(f"{role}{number}", role, process=process, mixed=mixed, model=model)
    homes = set()
    for number in range(6):
        (sending,) = (a for a in bench.submit(f"r{number}") if isinstance(a, Send))
        assert isinstance(sending.message, Prefill)
        homes.add(sending.worker[0])
        assert sending.worker[0][-1] == sending.message.decode.worker_id[-1]
    assert homes == {"prefill0", "prefill1"}


def test_a_worker_that_fits_none_never_hears_that_it_does() -> None:
    """Not by a message that only tries its connection either: it would be ready for a second."""
    bench = Bench()
    bench.core.pools.remove(bench.core.pools.workers["d", 1], "gone")
    bench.hello("x", "decode", model=replace(MODEL, block_size=8))
    bench.core.connection_lost()
    probes = sent(bench.core.tick(bench.now), Alive)
    assert ["gets no work" in alive.misfit for alive in probes] == [True, True]
    assert "do not fit together" in system_snapshot(bench.core).gap
