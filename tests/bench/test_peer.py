"""Figures of a server beside another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.bench.peers import peer


def test_time_per_token_is_taken_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets slower with each run, and one server has half the other's time."""
    ran: list[tuple[str, int]] = []

    def run(url: str, load: str, seed: int, num_requests: int | None, reuses: bool) -> Any:
        assert (load, num_requests) == ("single_512", 1)
        ran.append((url, seed))
        return SimpleNamespace(
            latencies={"tpot": {"p50": (1 + len(ran) // 2) * (0.02 if url == "b" else 0.01)}}
        )

    monkeypatch.setattr(peer, "_run", run)
    figures = peer.by_turns("a", "b")
    assert figures["times_better_by_turns"] == pytest.approx(2, rel=0.2)
    assert figures["tpot_ms_by_turns_of_the_other"] > figures["tpot_ms_by_turns"]
    assert [url for url, _ in ran[:4]] == ["b", "a", "a", "b"]
    assert len({seed for _, seed in ran}) == peer.TURNS  # no prompt is sent to a server twice
