"""Coordinators that are found by name."""

from __future__ import annotations

import threading

import pytest

from splitserve.transport.channels.coordinator_links import NameWatch, addresses_of


def test_a_name_stands_for_all_its_addresses() -> None:
    assert addresses_of("dns://127.0.0.1:7700") == ("tcp://127.0.0.1:7700",)
    assert addresses_of("dns://[::1]:7700") == ("tcp://[::1]:7700",)
    assert "tcp://127.0.0.1:7700" in addresses_of("dns://localhost:7700")


def test_a_name_that_no_host_can_have_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = NameWatch([])
    watch._look_up("dns://coordinators..example:1")
    assert "cannot find coordinators by dns://coordinators..example:1" in caplog.text
    assert watch.addresses() == []


def test_it_follows_the_name_and_keeps_the_last_addresses_while_it_cannot_be_resolved() -> None:
    answers: list[tuple[str, ...] | OSError] = [
        OSError("not yet"),
        ("tcp://10.0.0.1:1",),
        OSError("the resolver is away"),
        ("tcp://10.0.0.1:1", "tcp://10.0.0.2:1"),
    ]
    seen: list[list[str]] = []
    over = threading.Event()

    def resolve(name: str) -> tuple[str, ...]:
        assert name == "dns://coordinators:1"
        seen.append(watch[0].addresses())
        if not answers:
            over.set()
            raise OSError("the test is over")
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    watch: list[NameWatch] = []
    begin = threading.Event()

    def resolve_once_begun(name: str) -> tuple[str, ...]:
        assert begin.wait(60)
        return resolve(name)

    watch.append(NameWatch(["dns://coordinators:1"], resolve_once_begun, every_s=0.001))
    begin.set()
    assert over.wait(60)
    watch[0].stop()
    one, two = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"
    assert seen[:5] == [[], [], [one], [one], [one, two]]
