"""The order in which a prefill worker computes prompts: one rule for the worker, the coordinator and the
planner. Pure.

    retries first, since their streams stand still; then the shortest prompt first, where each second of
    waiting counts as ``aging`` tokens less

The worker ranks by it, and the coordinator foresees by it what a worker has to compute before a new prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

UNLIMITED = 1 << 62


def prompt_rank(is_retry: bool, num_tokens_left: float, waited_s: float, aging: float) -> tuple[bool, float]:
    """Return the rank of a prompt; the least is computed first. ``aging``: tokens per second, so that no
    prompt starves."""
    return not is_retry, num_tokens_left - aging * waited_s


def max_prompt_tokens(pending: Iterable[int], budget: int) -> int:
    """Return the longest new prompt that is computed soon, in tokens, given the lengths of those that are
    pending.

    By ``prompt_rank``, without aging, a prompt of n tokens waits for every pending prompt of at most n. It is
    computed soon if nothing is ahead of it, or if it and all that is ahead are at most ``budget`` tokens.
    """
    tokens_ahead, longest = 0, UNLIMITED
    for length in sorted(pending):
        if length > longest:
            break
        tokens_ahead += length
        if tokens_ahead + length > budget:
            return min(longest, length - 1)  # a shorter prompt would be computed before this one
        longest = budget - tokens_ahead
    return longest
