"""A message about blocks waits for the puts under its lease, and what waits is sent in order."""

from __future__ import annotations

from splitserve.transport.handoff.held_back import HeldBack

PEER = ("d0", 1)


class Puts:
    """``writing``: the leases under which a put is still being written."""

    def __init__(self, *writing: int) -> None:
        self.writing, self.sent, self.held = set(writing), list[str](), HeldBack()

    def send(self, lease: int, text: str) -> None:
        self.held.send(PEER, lease, self.writing.__contains__, lambda: self.sent.append(text))

    def end(self, *leases: int) -> None:
        self.writing -= set(leases)
        self.held.written(PEER, self.writing.__contains__)


def test_a_release_goes_only_when_every_put_under_its_lease_has_ended() -> None:
    puts = Puts(1, 2)
    puts.send(1, "release 1")
    puts.send(3, "release 3")
    puts.send(0, "renew")
    assert puts.sent == ["release 3", "renew"]
    puts.end(2)
    assert puts.sent == ["release 3", "renew"]
    puts.end(1)
    assert puts.sent == ["release 3", "renew", "release 1"]


def test_what_is_held_back_is_sent_in_order() -> None:
    """Also what comes when the put has ended and nobody has looked since."""
    puts = Puts(1, 2)
    for text in ("placed", "handoff"):
        puts.send(1, text)
    puts.send(2, "release 2")
    puts.writing.discard(1)
    puts.send(1, "release 1")
    assert puts.sent == []
    puts.end()
    assert puts.sent == ["placed", "handoff", "release 1"]
    puts.end(2)
    assert puts.sent == ["placed", "handoff", "release 1", "release 2"]


def test_a_put_that_begins_while_others_are_sent_holds_back_the_rest_of_its_lease() -> None:
    puts = Puts(1)
    puts.held.send(PEER, 1, puts.writing.__contains__, lambda: puts.writing.add(2))
    puts.writing.add(2)
    puts.send(2, "placed")
    puts.send(2, "handoff")
    puts.writing.discard(2)
    puts.end(1)
    assert puts.sent == []
    puts.end(2)
    assert puts.sent == ["placed", "handoff"]


def test_nothing_is_sent_of_a_lease_whose_put_nobody_saw_end() -> None:
    """The peer would give its blocks to others while they are written."""
    puts = Puts(1, 2)
    puts.send(1, "handoff 1")
    puts.held.close(PEER, {1})
    puts.end(1, 2)
    puts.send(1, "release 1")
    puts.send(2, "release 2")
    assert puts.sent == ["release 2"]
