"""A request for an embedding ends with the prefill worker's report, whichever attempt it is of."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.lifecycle_bench import Bench, ends, sent

from splitserve.coordinator.lifecycle.actions import Action
from splitserve.transport.messages.messages import FirstToken, Prefill, RequestFailed, SamplingParams

STATE = np.arange(4, dtype=np.float32).tobytes()


def asked(bench: Bench) -> int:
    """Return the dispatch of a new request."""
    actions = bench.submit(sampling=SamplingParams(max_tokens=0), embeds=True)
    return dispatch_of(actions)


def dispatch_of(actions: list[Action]) -> int:
    (order,) = sent(actions, Prefill)
    assert order.spec.embeds
    return order.spec.dispatch


def report(bench: Bench, dispatch: int, **more: Any) -> list[Action]:
    done = FirstToken(coordinator=7, dispatch=dispatch, index=0, token=None, finished="length", **more)
    return bench.send("p", done)


def test_it_ends_with_the_hidden_state() -> None:
    bench = Bench()
    (end,) = ends(report(bench, asked(bench), embedding=STATE, num_cached_tokens=2))
    assert (end.finish_reason, end.embedding, end.num_cached_tokens) == ("length", STATE, 2)


def test_a_lost_attempt_is_made_again() -> None:
    bench = Bench()
    first = asked(bench)
    lost = RequestFailed(coordinator=7, dispatch=first, kind="internal", message="it raised")
    second = dispatch_of(bench.send("p", lost))
    assert ends(report(bench, first, embedding=STATE)) == []
    (end,) = ends(report(bench, second, embedding=STATE))
    assert (end.embedding, end.num_dispatches) == (STATE, 2)


def test_a_worker_of_an_older_release_is_no_wrong_answer() -> None:
    """It skips the field that asks for the embedding, and reports none."""
    bench = Bench()
    (end,) = ends(report(bench, asked(bench)))
    assert (end.error, end.embedding) == ("unavailable", b"")
    assert end.message.startswith("prefill worker p computes no embeddings: it is of an older release")


def test_logits_are_as_many_as_were_asked_for() -> None:
    """An older worker skips the field that asks for them, and reports the hidden state."""
    bench = Bench()
    for sent_back in (STATE, STATE[:8]):
        actions = bench.submit(
            f"r{len(sent_back)}", sampling=SamplingParams(max_tokens=0), embeds=True, logits_of=(5, 6)
        )
        (order,) = sent(actions, Prefill)
        assert order.spec.logits_of == (5, 6)
        (end,) = ends(report(bench, order.spec.dispatch, embedding=sent_back))
        if sent_back == STATE:
            assert end.message.startswith("prefill worker p computes no logits: it is of an older release")
        else:
            assert end.embedding == sent_back
