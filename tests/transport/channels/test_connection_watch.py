"""A missing connection is noticed: by the connecting end with the time since when, by the listening end only
that one has ended."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import zmq
from support.ports import kept_port

from splitserve.transport.channels import channels
from splitserve.transport.channels.channels import DealerChannel, RouterChannel
from splitserve.transport.channels.keys import new_key
from splitserve.transport.messages.messages import FROM_DECODE, FROM_PREFILL, Alive

DEADLINE_S = 60.0  # against hanging alone


def until_gone(channel: DealerChannel, gone: bool, router: RouterChannel | None = None) -> None:
    """``router``: it is served meanwhile, as its owner always does."""
    deadline = time.monotonic() + DEADLINE_S
    while (channel.gone_since(time.monotonic()) is not None) is not gone:
        assert time.monotonic() < deadline
        assert router is None or router.receive(1) == []
        time.sleep(0.005)


def test_it_comes_goes_and_comes_again() -> None:
    with kept_port() as address, DealerChannel.connect(address, b"p", None, FROM_DECODE) as dealer:
        router = RouterChannel.bind(address, None, FROM_PREFILL)
        assert not dealer.ever_connected
        until_gone(dealer, False)
        before = time.monotonic()
        router.close()
        until_gone(dealer, True)
        since = dealer.gone_since(time.monotonic() + 100)
        assert since is not None
        assert before <= since <= time.monotonic()
        assert dealer.ever_connected
        with RouterChannel.bind(address, None, FROM_PREFILL):
            until_gone(dealer, False)


def test_who_has_never_answered_is_missing_from_the_start() -> None:
    with zmq.Context() as context, context.socket(zmq.STREAM) as mute:
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        before = time.monotonic()
        with DealerChannel.connect(f"tcp://127.0.0.1:{port}", b"p", None, FROM_DECODE) as dealer:
            assert mute.poll(int(DEADLINE_S * 1000))  # connected, but nobody speaks ZeroMQ there
            since = dealer.gone_since(time.monotonic())
            assert since is not None
            assert before <= since <= time.monotonic()


def test_who_listens_hears_that_a_connection_has_ended() -> None:
    with RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_PREFILL) as router:
        router.watch_connections()
        with DealerChannel.connect(router.address, b"p", None, FROM_DECODE) as dealer:
            until_gone(dealer, False)
            assert not router.lost_any()
        deadline = time.monotonic() + DEADLINE_S
        while not router.lost_any():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert not router.lost_any(), "it is told once"


def test_a_change_of_keys_ends_connections_with_its_last_step_only() -> None:
    """Each lost connection takes messages along, and is made again by chance: two keys are two endpoints."""
    old, new = new_key(), new_key()
    with (
        RouterChannel.bind("tcp://127.0.0.1:*", old, FROM_PREFILL) as router,
        DealerChannel.connect(router.address, b"p", old, FROM_DECODE) as dealer,
    ):
        until_gone(dealer, False)
        for step in (replace(old, second=new), replace(new, second=old)):
            router.change_key(step)
            with DealerChannel.connect(router.address, b"n", step, FROM_DECODE) as another:
                while another.gone_since(time.monotonic()) is not None:  # until the change is made
                    assert dealer.gone_since(time.monotonic()) is None
                    assert router.receive(1) == []
        router.change_key(new)
        until_gone(dealer, True, router)


def test_a_change_of_keys_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends all connections, which come back; a check at once would find all of them missing."""
    key = new_key()
    with RouterChannel.bind("tcp://127.0.0.1:*", key, FROM_PREFILL) as router:
        monkeypatch.setattr(channels, "REJOIN_S", DEADLINE_S)
        with DealerChannel.connect(router.address, b"p", key, FROM_DECODE) as dealer:
            until_gone(dealer, False)
            router.change_key(new_key())
            until_gone(dealer, True, router)
            assert router.reach(b"p", Alive(coordinator=1))
            assert router.counters.dropped_unknown == 1
            monkeypatch.setattr(channels, "REJOIN_S", 0.0)
            router.change_key(replace(new_key(), second=key))
            assert router.reach(b"nobody", Alive(coordinator=1)), "a connection may reach the other endpoint"
            router.change_key(key)
            assert not router.reach(b"nobody", Alive(coordinator=1))
