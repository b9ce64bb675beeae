"""Prompt lookup finds where a text repeats itself, at a cost that does not grow with the text."""

from __future__ import annotations

import time

import numpy as np
import pytest

from splitserve.decode.text_match import FIRST_RATE, MOST_READ, TextMatch
from splitserve.engine.step.batch import SamplingState
from splitserve.transport.messages.messages import SamplingParams


def test_a_match_that_never_holds_is_given_up() -> None:
    """Without rows: the rate of hits is known of each token that comes."""
    state = SamplingState(SamplingParams(max_tokens=500), [1, 2, 3, 4] * 5, [1])
    match = TextMatch(state)
    for turn in range(40):
        match.read()
        state.output_token_ids += [2, 3, 50 + turn, 1]
    match.read()
    assert match.rate < FIRST_RATE / 4


def test_a_match_follows_the_newest_place_and_goes_round() -> None:
    state = SamplingState(SamplingParams(max_tokens=50), [5, 6, 7, 1, 5, 6, 7, 2], [5, 6, 7])
    match = TextMatch(state)
    assert match.read()
    assert match.draft(3, frozenset()) == [2, 5, 6]
    assert match.draft(3, frozenset([5])) == [2]
    state.output_token_ids += [8, 9, 8, 9, 8, 9]
    assert match.read()
    assert match.draft(5, frozenset()) == [8, 9, 8, 9, 8]


def test_a_long_output_is_read_little_by_little_and_drafted_when_all_is_read() -> None:
    """For the whole batch waits meanwhile."""
    output = [*range(10 * MOST_READ), 4, 5, 6]
    match = TextMatch(SamplingState(SamplingParams(max_tokens=9999), [1], output))
    assert [match.read() for _ in range(12)] == [False] * 10 + [True] * 2
    assert match.draft(2, frozenset()) == [7, 8]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts_match_too(length: int) -> None:
    state = SamplingState(SamplingParams(max_tokens=50), [0] * length, [0] * 6)
    match = TextMatch(state)
    assert match.read()
    assert match.draft(2, frozenset()) == [0, 0]


@pytest.mark.timeout(60)
def test_a_token_after_a_long_prompt_costs_no_more_than_after_a_short_one() -> None:
    seconds = []
    for length in (1000, 200_000):
        state = SamplingState(SamplingParams(max_tokens=50), np.arange(length).tolist(), [1])
        match = TextMatch(state)
        best = float("inf")
        for turn in range(200):
            state.output_token_ids.append((turn * 7919) % length)
            start = time.perf_counter()
            match.read()
            best = min(best, time.perf_counter() - start)
        seconds.append(best)
    assert seconds[1] < 10 * seconds[0] + 1e-4
