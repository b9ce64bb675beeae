"""What `up` asks its coordinator."""

from __future__ import annotations

import httpx
import pytest

from splitserve.cli import cluster_state


@pytest.mark.parametrize(("processes", "ready"), [(1, True), (2, False)])
async def test_every_process_of_a_coordinator_is_to_serve(
    monkeypatch: pytest.MonkeyPatch, processes: int, ready: bool
) -> None:
    """Each connection reaches one of them, by chance: of two, one is ready."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200 if len(asked) <= 3 else 503)

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(cluster_state, "_asking", lambda *_: httpx.AsyncClient(transport=transport))
    assert await cluster_state.is_ready("http://x", None, ["a b"], processes) is ready
    assert set(asked) == {"http://x/ready?model=a+b"}
