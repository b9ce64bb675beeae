"""Probes of a worker: from the first line of its process until it drains."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from splitserve.transport.errors import AddressError
from splitserve.worker.health import HUNG_AFTER_S, Health, HealthServer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def role(*misfits: str, leaving: bool = False, refusal: str = "") -> Any:
    return SimpleNamespace(
        links=SimpleNamespace(misfits=list(misfits), refusal=refusal),
        departure=SimpleNamespace(has_begun=leaving),
    )


def worker(**roles: Any) -> Any:
    return SimpleNamespace(roles=roles, turned_at=0.0, running_step=None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock)


@pytest.fixture
def url(health: Health) -> Iterator[str]:
    server = HealthServer(0, health)
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def test_from_loading_to_serving(url: str, health: Health) -> None:
    for page in ("/health", "/ready"):
        answer = httpx.get(url + page)
        assert (answer.status_code, answer.text) == (503, "the model is being loaded\n")
    process = worker(decode=role())
    health.watch(process)
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").text == "no coordinator has taken in the decode worker\n"
    process.roles = {"decode": role(refusal="another vocabulary")}
    expected = "no coordinator has taken in the decode worker: another vocabulary\n"
    assert httpx.get(f"{url}/ready").text == expected
    process.roles = {"decode": role("")}
    assert (httpx.get(f"{url}/ready").status_code, httpx.get(f"{url}/ready").text) == (200, "ok\n")
    assert httpx.get(f"{url}/metrics").status_code == 404
    assert httpx.post(f"{url}/health").status_code == 501, "nothing can be changed"


def test_a_worker_that_no_other_fits_or_that_drains_is_not_ready(health: Health) -> None:
    process = worker(decode=role("other weights", ""))
    health.watch(process)
    assert health.gap() == "", "one coordinator has a worker that it fits"
    process.roles = {"decode": role("other weights", "other weights")}
    assert health.gap() == "other weights"
    process.roles = {"decode": role(""), "prefill": role("", leaving=True)}
    assert health.gap() == "the worker drains"
    process.roles = {}
    assert health.gap() == "the worker drains"
    assert health.fault() == "", "which is no reason to kill it"


def test_a_loop_that_stands_still_and_a_step_that_never_ends_are_faults(health: Health, clock: Clock) -> None:
    process = worker(decode=role(""))
    health.watch(process)
    clock.now += HUNG_AFTER_S - 1
    assert health.fault() == ""
    clock.now += 1
    assert "loop has stood still for 30 s" in health.fault()
    assert health.gap() == health.fault()
    for _ in range(5):  # step after step
        process.turned_at, process.running_step = clock.now, object()
        assert health.fault() == ""
        clock.now += HUNG_AFTER_S - 1
    process.turned_at = clock.now = clock.now + 1
    assert health.fault() == "a step has been running for 30 s"


def test_a_port_that_is_taken_is_an_error(url: str, health: Health) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(AddressError, match=f"--health-port {port}"):
        HealthServer(port, health)
