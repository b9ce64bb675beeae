"""A language model whose KV cache can be wrong: every token depends on every slot that was read.

    kv[0][p]    = mix(kv[0][p - 1] as read from memory, token[p])
    kv[l][p]    = deeper(kv[l - 1][p] as read from memory)
    token       = mix(sum of kv[all layers][0..p] as read from memory) mod VOCABULARY

(with a sliding window, of its last tokens; a model with states adds OF_A_STATE times the newest, which
states.py keeps), so one corrupt, stale or foreign slot anywhere in a sequence's
blocks changes its tokens from then on. A token's logprob is a function of the token, so that one which is
lost, doubled or another's shows. An adapter shifts every token that is read, and the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

VOCABULARY = 997
EOS = frozenset(range(32))
MASK = (1 << 64) - 1
NUM_LAYERS = 3
OF_A_STATE = 5
FACTOR, SUMMAND = 13, 35
"""The sum of a token's values in all layers is FACTOR * kv[0] + SUMMAND, modulo 2**64."""


def mix(a: int, b: int) -> int:
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & MASK
    return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & MASK


def first_layer(kv: int, tokens: Iterable[int]) -> list[int]:
    """kv[0] of each of these tokens; ``kv``: that of the token before them."""
    values = []
    for token in tokens:
        x = (
            kv * 0x9E3779B97F4A7C15 + token + 0x632BE59BD9B4E019
        ) & MASK  # mix, written out: it runs once for each token of each step
        kv = ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & MASK
        values.append(kv)
    return values


def deeper(kv: int) -> int:
    return (3 * kv + 7) & MASK


def next_token(total: int, repeated: Sequence[int], position: int) -> int:
    """``total``: the sum of all slots. ``repeated``: what the model mostly repeats, token by token; empty:
    nothing."""
    x = mix(total & MASK, 1)
    return (repeated[position % len(repeated)] if repeated and x % 8 else x) % VOCABULARY


def logprob(token: int) -> float:
    return -float(token)


def expected_output(
    prompt: Sequence[int],
    read_prompt: Sequence[int],
    read_output: Callable[[int], int],
    max_tokens: int,
    min_tokens: int,
    stops: frozenset[int],
    max_model_len: int,
    window: int = 0,
    repeats: bool = False,
    shift: int = 0,
    has_states: bool = False,
) -> tuple[list[int], str]:
    """What a run without faults answers, and why it ends: a pure function of the request. ``shift``: of its
    adapter. ``read_prompt``, ``read_output``: what the model reads, see images.py."""
    output: list[int] = []
    longest = min(max_tokens, max_model_len - len(prompt))
    values = first_layer(0, [token + shift for token in read_prompt])
    while longest:
        seen = values[-window:]
        total = FACTOR * sum(seen) + SUMMAND * len(seen) + shift + OF_A_STATE * has_states * values[-1]
        token = next_token(total, prompt if repeats else (), len(prompt) + len(output))
        output.append(token)
        if token in stops and len(output) > min_tokens:
            return output, "stop"
        if len(output) == longest:
            break
        values.append(mix(values[-1], read_output(token) + shift))
    return output, "length"
