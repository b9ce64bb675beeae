"""Blocks are free only when nothing that was begun to be written into them can land any more."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.fields import COUNT_BITS
from splitserve.transport.messages.messages import Meet, ModelIdentity, PeerId, Retire
from splitserve.transport.movers.targets import WaysIn

MODEL = ModelIdentity(kv_name="f", dtype="float32", block_size=16, cache_map=states(1, 1), block_bytes=1)
OLD, NEW = ("p0", (1 << COUNT_BITS) + 1), ("p0", (1 << COUNT_BITS) + 2)


@dataclass
class Target:
    one_sided: bool
    lingers: bool
    closes: bool  # whether it can shut anybody out
    shut: set[PeerId] = field(default_factory=set)  # writers that are
    asked: list[PeerId] = field(default_factory=list)

    def shut_out(self, peer: PeerId) -> bool:
        self.asked.append(peer)
        return self.closes if not self.lingers else peer in self.shut


@dataclass
class Receiver:
    pids: dict[PeerId, int]
    silent: set[PeerId] = field(default_factory=set)
    reported: list[tuple[str, PeerId]] = field(default_factory=list)

    def writers(self) -> dict[PeerId, int]:
        return self.pids

    def writer_gone(self, peer: PeerId) -> None:
        self.reported.append(("gone", peer))

    def writer_shut_out(self, peer: PeerId) -> None:
        self.reported.append(("shut out", peer))
        self.silent.discard(peer)

    def silent_writers(self, now: float) -> set[PeerId]:
        return set(self.silent)


def meet(incarnation: int, pid: int = 7, failed: tuple[str, ...] = ()) -> Meet:
    return Meet(
        worker_id="p0",
        incarnation=incarnation,
        host="h",
        pid=pid,
        model=MODEL,
        movers=("nixl", "tcp"),
        failed=failed,
    )


class Ways:
    def __init__(self, mover: str) -> None:
        self.nixl = Target(one_sided=True, lingers=True, closes=True)
        targets = {"shm": Target(True, False, False), "nixl": self.nixl, "tcp": Target(False, False, True)}
        self.sentences: list[str] = []
        self.ways = WaysIn(targets, self.sentences.append)
        self.ways.met(OLD, mover)
        self.receiver = Receiver({OLD: 7})


@pytest.mark.parametrize(("mover", "at_once"), [("shm", True), ("tcp", True), ("nixl", False)])
def test_a_dead_writers_blocks_are_free_when_nothing_of_it_is_under_way(mover: str, at_once: bool) -> None:
    w = Ways(mover)
    assert w.ways.process_ended(OLD, w.receiver) is at_once
    assert w.receiver.reported == ([("gone", OLD)] if at_once else [])
    w.nixl.shut.add(OLD)
    if not at_once:
        assert w.ways.process_ended(OLD, w.receiver)
    assert w.receiver.reported == [("gone", OLD)]
    w.ways.look((), w.receiver, 0.0)
    assert w.receiver.reported == [("gone", OLD)], "nobody is asked for it again"


@pytest.mark.parametrize(("mover", "at_once"), [("shm", True), ("nixl", False)])
def test_a_process_of_another_name_is_met_when_nothing_of_the_old_one_is_under_way(
    mover: str, at_once: bool
) -> None:
    w = Ways(mover)
    assert w.ways.may_meet(NEW, meet(NEW[1]), True, w.receiver) is at_once
    w.nixl.shut.add(OLD)
    assert w.ways.may_meet(NEW, meet(NEW[1]), True, w.receiver)
    assert w.receiver.reported == [], "the core itself sees that it is the same process"


@pytest.mark.parametrize(("mover", "at_once"), [("shm", True), ("nixl", False)])
def test_retire_is_answered_when_nothing_of_that_name_is_under_way(mover: str, at_once: bool) -> None:
    w = Ways(mover)
    retire = Retire(incarnation=OLD[1])
    w.ways.met(NEW, mover)
    w.receiver.pids[NEW] = 7
    assert w.ways.may_retire(NEW, retire, w.receiver) is at_once
    w.nixl.shut.add(OLD)
    assert w.ways.may_retire(NEW, retire, w.receiver)
    assert NEW not in w.nixl.asked, "it goes on"


@pytest.mark.parametrize("pid", [7, 8])
@pytest.mark.parametrize("number", [-1, 1])
def test_who_was_started_anew_elsewhere_is_met_at_once_and_its_old_name_shut_out(
    pid: int, number: int
) -> None:
    """Whichever of the two numbers is the larger; in a container the process id is the same again."""
    w, anew = Ways("nixl"), ("p0", OLD[1] + (number << COUNT_BITS))
    w.ways.met(OLD, "nixl")
    assert w.ways.may_meet(anew, meet(anew[1], pid=pid), False, w.receiver)
    assert w.nixl.asked == [OLD]
    w.ways.met(anew, "nixl")
    assert w.ways.may_meet(OLD, meet(OLD[1]), False, w.receiver), "it is answered by who is here"
    assert w.nixl.asked == [OLD], (
        "what comes late of the one that was met first ends nothing of the one that came after it"
    )
    assert not w.receiver.reported
    w.nixl.shut.add(OLD)
    w.ways.look((), w.receiver, 0.0)
    assert w.receiver.reported == [("shut out", OLD)]
    assert "p0 can write no more" in w.sentences[0]


def test_whose_mover_has_failed_is_met_anew_when_nothing_by_that_one_is_under_way() -> None:
    w = Ways("nixl")
    again = meet(OLD[1], failed=("nixl",))
    assert not w.ways.may_meet(OLD, again, False, w.receiver)
    w.nixl.shut.add(OLD)
    assert w.ways.may_meet(OLD, again, False, w.receiver)
    assert w.receiver.reported == [("shut out", OLD)], "what it held by that mover is free"
    w.ways.met(OLD, "tcp")
    assert w.ways.may_meet(OLD, again, False, w.receiver)
    assert w.receiver.reported == [("shut out", OLD)] * 2, (
        "for leases granted meanwhile; tcp's do not end by this"
    )


@pytest.mark.parametrize(
    ("mover", "here", "ends"),
    [("nixl", True, True), ("nixl", False, True), ("shm", True, False), ("tcp", False, True)],
)
def test_a_silent_writer_is_shut_out_unless_it_has_mapped_the_pool(
    mover: str, here: bool, ends: bool
) -> None:
    w = Ways(mover)
    w.receiver.silent.add(OLD)
    w.nixl.shut.add(OLD)
    for now in (0.0, 1.0):
        w.ways.look([OLD] if here else [], w.receiver, now)
    assert w.receiver.reported == ([("shut out", OLD)] if ends else [])


@pytest.mark.parametrize("how", ["it says that its mover has failed", "it says nothing"])
def test_one_that_was_shut_out_and_granted_a_lease_after_that_does_not_keep_its_blocks(how: str) -> None:
    """It was silent for long, and its way in was closed; it lives on this host, does not know that, and fails
    at its next put only. It does not release that lease: nobody knows whether a failed mover's puts are over.
    """
    w = Ways("nixl")
    w.receiver.silent.add(OLD)
    w.nixl.shut.add(OLD)
    w.ways.look({OLD}, w.receiver, 0.0)
    assert w.receiver.reported == [("shut out", OLD)]
    w.ways.look({OLD}, w.receiver, 1.0)
    assert w.receiver.reported == [("shut out", OLD)], "it holds nothing now"
    if how == "it says nothing":
        w.receiver.silent.add(OLD)
        w.ways.look({OLD}, w.receiver, 9.0)
    else:
        assert w.ways.may_meet(OLD, meet(OLD[1], failed=("nixl",)), True, w.receiver)
    assert w.receiver.reported == [("shut out", OLD)] * 2
