"""The fuzzer's short run. (A million: ``python -m splitserve.bench.http.fuzz_http``.)"""

from __future__ import annotations

from splitserve.bench.http.fuzz_http import fuzz


def test_hostile_requests_do_the_coordinator_no_harm() -> None:
    run = fuzz(2_000, seed=20_000_000, num_connections=16, stalls=False)
    assert run["failures"] == []
    assert run["requests"] >= 2_000
    assert run["answers_by_status"]["200"] > 100
