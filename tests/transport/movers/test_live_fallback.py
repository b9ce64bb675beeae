"""A mover that breaks in use, forced or not, between two real workers: what was under way is given back, and
tcp takes its place, with a warning and a count."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.worker_pair import WorkerPair, spec

from splitserve.bench.null_workers import null_model
from splitserve.transport.errors import MoverError
from splitserve.transport.messages.messages import Joined, Load, RequestFailed
from splitserve.transport.movers import nixl
from splitserve.transport.movers.nccl import NcclSource
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
    whole, left = SOURCES[mover].put, [2]  # the self-test, and one prompt

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
        pair.ask(spec(1, request=1, epoch=1))
        pair.until(lambda: any(isinstance(m, RequestFailed) for m in pair.received))
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
    logged = [record.message for record in caplog.records if " to d" in record.message]
    made_anew = "the mover nccl to d failed its self-test (broken by a test); tcp is used instead"
    assert logged[-2:] == [
        made_anew if mover == "nccl" else "cannot hand KV blocks to d: broken by a test; from now on by tcp",
        "hands KV blocks to d by tcp",
    ]
    assert sum("from now on" in line or "instead" in line for line in logged) == 1
    name = "shm" if mover == "auto" else mover
    assert logged[0] == f"hands KV blocks to d by {name}"


def test_the_bytes_of_a_self_test_are_no_handoff() -> None:
    with WorkerPair("shm") as pair:

        def sent() -> float:
            loads = [m for m in pair.received if isinstance(m, Load) and m.worker_id == "p"]
            return loads[-1].counters["handoff_bytes"]

        pair.ask(spec(0))
        pair.until(lambda: any(isinstance(m, Joined) for m in pair.received) and sent() > 0)
        assert sent() == 2 * null_model(1, 16).pool[0].nbytes


def leave_out_bytes(self: Any, *arguments: Any) -> None:
    """A copy that completes, and copies nothing."""
    self._done += [(arguments[0], position) for position, _, _ in arguments[2]]


def cannot_map(self: Any, *arguments: Any) -> None:
    raise MoverError("that cannot be mapped")


BROKEN: list[tuple[str, Any, str]] = [
    ("put", leave_out_bytes, "1 KV blocks arrived corrupt twice"),
    ("__init__", cannot_map, "that cannot be mapped"),
]


@pytest.mark.parametrize(("method", "broken", "why"), BROKEN, ids=[method for method, *_ in BROKEN])
def test_auto_leaves_out_a_mover_that_does_not_work_between_two_workers(
    method: str, broken: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request notices."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ShmSource, method, broken)
    with WorkerPair("auto") as pair:
        pair.ask(spec(0))
        pair.until(lambda: any(isinstance(m, Joined) for m in pair.received))
    assert not any(isinstance(m, RequestFailed) for m in pair.received)
    sentence = f"the mover shm to d failed its self-test ({why}); tcp is used instead"
    assert [record.message for record in caplog.records if "self-test" in record.message] == [sentence]


def test_a_mover_that_is_forced_and_does_not_work_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ShmSource, "put", leave_out_bytes)
    with WorkerPair("shm") as pair:
        pair.ask(spec(0))
        pair.until(lambda: any(isinstance(m, RequestFailed) for m in pair.received))
    (failed,) = [m for m in pair.received if isinstance(m, RequestFailed)]
    assert failed.message.startswith(
        "the mover shm to d failed its self-test (1 KV blocks arrived corrupt twice)"
    )
    assert "--mover" in failed.message
    assert (logging.ERROR, failed.message) in [(record.levelno, record.message) for record in caplog.records]
