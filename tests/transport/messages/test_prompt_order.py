"""The order of prompts: what the coordinator foresees is what a prefill worker does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.transport.messages.prompt_order import UNLIMITED, max_prompt_tokens, prompt_rank

LENGTHS = st.lists(st.integers(1, 60), max_size=12)


def is_computed_soon(num_tokens: int, pending: list[int], budget: int) -> bool:
    """By the order in which a worker computes prompts that came at the same time, a new one last among
    equals."""
    own = prompt_rank(False, num_tokens, 0.0, 1.0)
    ahead = sum(length for length in pending if prompt_rank(False, length, 0.0, 1.0) <= own)
    return ahead == 0 or ahead + num_tokens <= budget


@given(LENGTHS, st.integers(1, 200))
def test_the_longest_prompt_is_found_by_the_workers_own_order(pending: list[int], budget: int) -> None:
    longest = max_prompt_tokens(pending, budget)
    if longest == UNLIMITED:
        assert not pending
        return
    assert longest == 0 or all(is_computed_soon(n, pending, budget) for n in range(1, longest + 1))
    assert not is_computed_soon(longest + 1, pending, budget)


def test_retries_go_first_and_waiting_counts() -> None:
    assert prompt_rank(True, 1000, 0.0, 64.0) < prompt_rank(False, 1, 0.0, 64.0)
    assert prompt_rank(False, 100, 0.0, 64.0) > prompt_rank(False, 100, 0.1, 64.0)
    assert prompt_rank(False, 100, 1.0, 64.0) < prompt_rank(False, 40, 0.0, 64.0), (
        "100 tokens less 64 for a second"
    )
