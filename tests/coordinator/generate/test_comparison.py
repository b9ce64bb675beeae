"""Two answers are compared the same way in whatever order their tokens come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.coordinator.generate.comparison import COPY, CUT, FIRST, Comparison

TOKENS = st.lists(st.integers(0, 2), max_size=6)
ENDS = st.sampled_from(["stop", "length"])


def expected(first: list[int], copy: list[int], end: str, copys_end: str) -> tuple[str, int]:
    common = 0
    while common < min(len(first), len(copy)) and first[common] == copy[common]:
        common += 1
    if end == CUT and common == len(first):
        return ("same" if common else "dropped"), common
    same = first == copy and end == copys_end
    return ("same" if same else "different"), common


@given(TOKENS, TOKENS, st.sampled_from(["stop", "length", CUT]), ENDS, st.randoms(use_true_random=False))
def test_any_order_has_the_same_result(
    first: list[int], copy: list[int], end: str, copys_end: str, chance: object
) -> None:
    comparison = Comparison()
    waiting = {FIRST: [*first, end], COPY: [*copy, copys_end]}
    while any(waiting.values()):
        side = chance.choice([side for side in waiting if waiting[side]])  # type: ignore[attr-defined]
        each = waiting[side].pop(0)
        if isinstance(each, int):
            comparison.push(side, each)
        else:
            comparison.end(side, each)
    assert (comparison.result, comparison.position) == expected(first, copy, end, copys_end)


def test_what_is_compared_is_not_kept() -> None:
    comparison = Comparison()
    for token in range(10_000):
        comparison.push(token % 2, token)
        comparison.push(1 - token % 2, token)
    assert len(comparison._ahead) == 0
    assert (comparison.result, comparison.position) == (None, 10_000)
