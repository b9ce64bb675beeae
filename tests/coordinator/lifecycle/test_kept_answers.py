"""A client that comes again gets the answer that a worker keeps, also where it comes before that worker."""

from __future__ import annotations

import pytest
from support.lifecycle_bench import Bench, sent

from splitserve.coordinator.lifecycle.actions import Action
from splitserve.transport.messages.messages import BlockEvents, Prefill, RequestFailed, Resume

ANSWER = b"an answer's name"


class ComingAgain(Bench):
    """A coordinator that has just started: no worker has reported what it keeps."""

    def report(self, name: str, kept: bytes = b"", number: int = 1) -> list[Action]:
        """A worker's cache report arrives; return what the next tick does."""
        events = BlockEvents(
            worker_id=name,
            incarnation=1,
            number=number,
            reset=number == 1,
            stored=b"",
            removed=b"",
            answers_kept=kept,
        )
        return self.send(name, events) + self.core.tick(self.now)

    def at(self, now: float) -> list[Action]:
        self.now = now
        actions = self.load("p", []) + self.load("d", [])
        return actions + self.core.tick(now)


def test_a_request_waits_for_the_report_of_a_worker_that_has_just_come() -> None:
    bench = ComingAgain()
    assert not bench.submit(answer_id=ANSWER)
    assert sent(bench.submit("other"), Prefill), "one without a key waits for nothing"
    bench.now = 0.1
    (order,) = sent(bench.report("d", ANSWER), Resume)
    assert (order.answer_id, order.request_id) == (ANSWER, "r")
    assert bench.core.outcomes.num_resumed == 1


def test_it_waits_a_second_for_the_workers_of_a_coordinator_that_was_restarted() -> None:
    """They come back one after the other, and the client comes between the first and the keeper."""
    bench = ComingAgain()
    bench.report("d")
    assert not bench.submit(answer_id=ANSWER), "no second computation"
    assert not sent(bench.at(0.9), Prefill)
    bench.hello("d2", "decode")
    assert not sent(bench.at(1.1), Prefill), "d2 has not reported"
    assert sent(bench.report("d2", ANSWER), Resume)


@pytest.mark.parametrize("leaves", [False, True])
def test_it_is_computed_where_no_worker_keeps_it(leaves: bool) -> None:
    bench = ComingAgain()
    bench.submit(answer_id=ANSWER)
    bench.report("d")
    bench.hello("d2", "decode")
    assert not sent(bench.at(1.1), Prefill)
    assert sent(bench.load("d2", [], draining=True) if leaves else bench.report("d2"), Prefill)
    assert not bench.core.outcomes.num_resumed


def test_one_that_waits_for_room_is_resumed_when_its_keeper_comes() -> None:
    bench = ComingAgain(max_num_seqs=1)
    bench.report("d")
    bench.at(2.0)
    assert sent(bench.submit("first"), Prefill)
    assert not bench.submit(answer_id=ANSWER)
    bench.hello("d2", "decode")
    assert sent(bench.report("d2", ANSWER), Resume)


def test_an_answer_that_is_kept_no_more_is_computed() -> None:
    bench = ComingAgain()
    bench.report("d", ANSWER)
    (order,) = sent(bench.submit(answer_id=ANSWER), Resume)
    gone = RequestFailed(coordinator=7, dispatch=order.dispatch, kind="preempted", message="it is not kept")
    assert len(sent(bench.send("d", gone), Prefill)) == 1
    assert bench.core.outcomes.num_resumed == 1


def test_a_resumed_answer_goes_on_elsewhere_when_its_keeper_dies() -> None:
    bench = ComingAgain()
    bench.hello("d2", "decode")
    bench.report("d", ANSWER)
    assert sent(bench.submit(answer_id=ANSWER), Resume)
    assert sent(bench.core.process_ended(("d", 1), bench.now), Prefill)
