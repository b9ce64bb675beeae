"""The mean length of answers, from those that have ended and those that still run."""

from __future__ import annotations

import random

import pytest

from splitserve.steering.output_lengths import OutputLengths, Span


class Answers:
    """Ten a second come, each with a token every 0.1 s."""

    def __init__(self) -> None:
        self.lengths, self._running = OutputLengths(), dict[int, list[list[int]]]()  # [tokens, length]

    def run(self, seconds: int, kind: int, *lengths: int, random: random.Random) -> list[float]:
        """Return the mean that is thought of after each second; ``lengths`` are drawn from."""
        found = []
        for _ in range(seconds):
            running = self._running.setdefault(kind, [])
            running += [[0, random.choice(lengths)] for _ in range(10)]
            spans: dict[int, list[Span]] = {}
            for each, answers in self._running.items():
                for answer in answers:
                    before, answer[0] = answer[0], min(answer[1], answer[0] + 10)
                    spans.setdefault(each, []).append((before, answer[0], answer[0] == answer[1]))
                answers[:] = [answer for answer in answers if answer[0] < answer[1]]
            self.lengths.take(spans)
            found.append(self.lengths.means(0.0)[kind])
        return found


def test_short_answers_that_end_first_do_not_make_all_seem_short() -> None:
    """Half have 20 tokens, half 300: the mean of those that end in the first 29 s is 20."""
    found = Answers().run(60, 1, 20, 300, random=random.Random(1))
    assert min(found[10:29]) > 50, "those that run have passed 20 already"
    assert found[-1] == pytest.approx(160, rel=0.3)
    assert min(found[20:]) > 80


def test_what_is_known_of_a_kind_is_kept_while_others_come() -> None:
    answers, chance = Answers(), random.Random(2)
    answers.run(30, 1, 40, random=chance)
    answers.run(200, 2, 400, random=chance)
    means = answers.lengths.means(0.0)
    assert means[1] == pytest.approx(40, rel=0.2)
    assert means[2] == pytest.approx(400, rel=0.15)
    assert means[3] == pytest.approx(400, rel=0.3), "a new kind is thought to be as all that came lately"


def test_nothing_is_known_before_one_has_ended() -> None:
    lengths = OutputLengths()
    lengths.take({1: [(0, 50, False)]})
    assert lengths.means(100.0)[1] == 100.0
    lengths.take({1: [(50, 51, True)]})
    assert lengths.means(100.0)[1] == pytest.approx(51, rel=0.1)
