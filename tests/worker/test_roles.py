"""A process that changes its role: when a worker of the other role may begin beside the one that is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker_pair import process_settings_kept

from splitserve.bench.studies.steer_workload import worker as profile
from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.paced_runner import paced_model
from splitserve.engine.step.grammar import GrammarThread
from splitserve.transport.handoff.protocol import CloseLease
from splitserve.worker import loop
from splitserve.worker.live_parts import live_parts
from splitserve.worker.live_roles import PrefillRole
from splitserve.worker.loop import Worker
from splitserve.worker.main import serve
from splitserve.worker.played_role import LINGER_S
from splitserve.worker.roles import Departure
from splitserve.worker.settings import FlexibleSettings


@pytest.fixture
def flexible(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    """A decode worker, or one of the test's roles, without a coordinator."""
    start_as, _, borrows = getattr(request, "param", "decode").partition(" ")
    profile().write(tmp_path / "profile.json")
    settings = FlexibleSettings(
        model=DEMO_MODEL,
        name="w",
        start_as=start_as,  # type: ignore[arg-type]
        borrow=bool(borrows),
        insecure=True,
        mover="tcp",
        coordinator="tcp://127.0.0.1:9",
        runner=f"paced:{tmp_path / 'profile.json'}",
    )
    process = Worker(settings, live_parts(settings, paced_model(settings)))
    yield process
    if process.roles:
        process.leave()
        process.leave()
        with process_settings_kept():
            serve(process)


def test_both_roles_for_a_moment(flexible: Worker) -> None:
    assert flexible.begin("prefill")
    assert flexible.begin("prefill"), "said again, it has begun"


def test_a_role_that_is_still_ending_does_not_begin_again(flexible: Worker) -> None:
    """Otherwise a role that drains for it would leave no worker behind."""
    flexible.begin("prefill")
    flexible.roles["decode"].core.drain(0.0)
    assert not flexible.begin("decode")


def test_a_worker_that_cannot_change_its_role_goes_on_when_told_to(flexible: Worker) -> None:
    core = flexible.roles["decode"].core
    Departure(core, "decode", None).flip("prefill", None, 0.0)
    assert not core.drains


def test_a_role_that_rests_again_lingers_again(flexible: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may wait for its last message."""
    role, host = flexible.roles["decode"], flexible._host
    assert host is not None
    role.core.drain(0.0)
    assert not role.departure.is_due(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(type(role.core), "held", [(1, 1)])  # a prompt that had been offered before
        assert not role.departure.is_due(0.9 * host.linger_s)
    assert not role.departure.is_due(1.8 * host.linger_s)
    assert role.departure.is_due(3 * host.linger_s)


def test_a_role_that_waits_for_goodbyes_answer_grants_no_blocks(
    flexible: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late offer was granted just then; the role ended, the process went on, and never had the blocks
    back."""
    role, came = flexible.roles["decode"], list[float]()
    monkeypatch.setattr(role._receiving, "receive", lambda ready, core, now, on_message: came.append(now))
    (link,) = role.links._links.values()
    link.coordinator = 1  # it has welcomed the worker
    role.core.drain(0.0)
    leaves_at = role.departure._host.linger_s  # type: ignore[union-attr]
    ended = []
    for now in (0.0, leaves_at, leaves_at + 0.1, leaves_at + LINGER_S):
        role.receive(set(), now)
        ended.append(role.has_ended(now))
    assert (came, ended) == ([0.0, leaves_at], [False, False, False, True])


def test_a_role_that_ends_keeps_the_other_waiting_for_nothing(
    flexible: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last spans took up to 10 s where the collector did not answer; a worker is dead after 1.5 s."""
    over, ended = threading.Event(), list[bool]()
    monkeypatch.setattr(GrammarThread, "stop", lambda _: ended.append(over.wait(60)))
    flexible.begin("prefill")
    flexible.end("decode")
    assert ended == []
    over.set()


def test_a_process_that_is_to_end_begins_nothing(flexible: Worker) -> None:
    flexible.leave()
    assert not flexible.begin("prefill")


def test_a_signal_while_a_role_begins_ends_that_one_too(
    flexible: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not among the roles yet, and the process went on."""

    def made_while_leaving(*parts: Any) -> PrefillRole:
        flexible.leave()
        return PrefillRole(*parts)

    monkeypatch.setattr(loop, "PrefillRole", made_while_leaving)
    flexible.begin("prefill")
    with process_settings_kept():
        serve(flexible)
    assert not flexible.roles


@pytest.mark.parametrize("flexible", ["prefill borrows", "decode borrows"], indirect=True)
def test_a_worker_that_borrows_says_which_role_it_prefers(flexible: Worker) -> None:
    hellos = {role: played.hello(1) for role, played in flexible.roles.items()}
    assert sorted(hellos) == ["decode", "prefill"]
    assert {(hello.mixed, hello.process, hello.home) for hello in hellos.values()} == {
        (True, "w", flexible._settings.start_as)  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("flexible", ["mixed", "decode borrows"], indirect=True)
def test_a_mixed_worker_is_of_both_roles_or_of_none(flexible: Worker) -> None:
    """Otherwise one drained half would be missing for as long as the process lives."""
    assert sorted(flexible.roles) == ["decode", "prefill"]
    flexible.roles["decode"].core.drain(0.0)
    with process_settings_kept():
        serve(flexible)
    assert not flexible.roles


def test_a_lease_that_a_heartbeat_ends_is_closed_in_the_same_turn(
    flexible: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn reads what has arrived first: a parcel of a dead writer was written into freed blocks."""
    receiving, done = flexible.roles["decode"]._receiving, []
    monkeypatch.setattr(
        receiving, "release_dead_writers", lambda core, now: core._actions.append(CloseLease(7))
    )
    monkeypatch.setattr(receiving, "carry_out", done.append)
    flexible.turn(set(), 1e6)
    assert done == [CloseLease(7)]


@pytest.mark.parametrize("flexible", ["mixed"], indirect=True)
def test_the_first_role_of_a_drained_mixed_worker_ends_as_its_process_will(flexible: Worker) -> None:
    """It was taken for a role after a flip: it reported to its peers that it had retired, with requests under
    way, and could have begun again."""
    flexible.roles["prefill"].core.drain(0.0)
    flexible.turn(set(), 0.0)
    assert len(flexible.roles) < 2
    assert not flexible._retiring
    assert not flexible.begin("prefill")
