"""The address of a decode worker that listens everywhere."""

from __future__ import annotations

import logging

import pytest

from splitserve.transport.errors import AddressError
from splitserve.transport.process.host import advertised_host

COORDINATOR = "tcp://127.0.0.1:7000"


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:7740", "tcp://*:7740", "tcp://[::]:7740"])
def test_listening_everywhere_it_is_found_where_the_coordinator_sees_it(
    listen: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert advertised_host(listen, "", COORDINATOR) == "127.0.0.1"
    (logged,) = caplog.messages
    assert listen in logged
    assert "127.0.0.1; --advertise-host names another" in logged
    assert advertised_host(listen, "alpha", COORDINATOR) == "alpha"


def test_an_address_is_told_as_it_is() -> None:
    assert advertised_host("tcp://192.0.2.7:7740", "", COORDINATOR) == "192.0.2.7"
    assert advertised_host("tcp://[2001:db8::1]:7740", "", COORDINATOR) == "2001:db8::1"


def test_where_it_cannot_be_found_the_worker_says_what_to_do() -> None:
    with pytest.raises(
        AddressError, match=r"--listen tcp://0\.0\.0\.0:7740 names no address .* give --advertise-host"
    ):
        advertised_host("tcp://0.0.0.0:7740", "", "tcp://no-such-host.invalid:7000")


@pytest.mark.parametrize(("coordinator", "warns"), [(COORDINATOR, False), ("tcp://192.0.2.10:7700", True)])
def test_a_worker_that_only_its_own_host_reaches_warns(
    coordinator: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each handoff from another host fails after seconds, and nothing else is logged."""
    assert advertised_host("tcp://127.0.0.1:*", "", coordinator) == "127.0.0.1"
    assert ["cannot reach --listen" in message for message in caplog.messages] == [True] * warns
