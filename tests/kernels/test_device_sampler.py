"""The GPU's sampler, in Triton's interpreter, chooses the tokens that the CPU's sampler chooses, for the same
reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import randn
from splitserve.bench.kernels.sampled_rows import booked, drawn
from splitserve.engine.step import device_sampler
from splitserve.engine.step.batch import SamplingState
from splitserve.engine.step.device_sampler import DeviceSampler, sampling_rows
from splitserve.engine.step.sampler import SampledRows, Sampler
from splitserve.kernels.gpu.sampling import IN_PROMPT, SLICE, SamplingRows, sample
from splitserve.kernels.gumbel_noise import hashed_seed, noise_key
from splitserve.kernels.reference import TorchKernels
from splitserve.transport.messages.messages import SamplingParams

triton_interpreter.install()
pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]

EOS = 3
VOCAB = 300
TOKENS = st.integers(0, 30)  # few, so that penalties and biases meet


def options() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"seed": st.integers(0, 2**63 - 1)},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            "top_k": st.sampled_from([1, 2, 7, 299, 300, 1000]),
            "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.999]),
            "min_p": st.sampled_from([0.01, 0.2, 1.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.3]),
            "presence_penalty": st.sampled_from([-1.0, 1.5]),
            "frequency_penalty": st.sampled_from([-0.5, 0.7]),
            "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 3.0, 100.0]), max_size=3),
            "min_tokens": st.integers(0, 4),
            "logprobs": st.integers(0, 3),
            "logprob_token_ids": st.lists(TOKENS, max_size=4, unique=True).map(tuple),
        },
    )


@st.composite
def states(draw: st.DrawFn) -> SamplingState:
    prompt, output = draw(st.lists(TOKENS, min_size=1, max_size=9)), draw(st.lists(TOKENS, max_size=6))
    return SamplingState(SamplingParams(max_tokens=99, **draw(options())), prompt, output)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=st.lists(states(), min_size=1, max_size=4), seed=st.integers(0, 999), ties=st.booleans())
def test_the_same_tokens_as_on_a_cpu(rows: list[SamplingState], seed: int, ties: bool) -> None:
    logits = randn(len(rows), VOCAB, seed=seed) * 3
    if ties:
        logits = logits.round()
    expected, expected_logprobs = Sampler(TorchKernels(), (EOS,)).sample(logits.clone(), booked(rows))
    sampled = booked(rows)
    for state in rows[::2]:
        del state.output_token_ids[-1:]  # the newest need not be booked
    found, logprobs = drawn(DeviceSampler((EOS,)), logits, sampled)
    assert found.tolist() == expected.tolist()
    assert logprobs.keys() == expected_logprobs.keys()
    for row, reported in expected_logprobs.items():
        assert logprobs[row].logprob == pytest.approx(reported.logprob, abs=1e-5)
        if rows[row].params.logprob_token_ids:
            assert logprobs[row].top_ids == reported.top_ids == rows[row].params.logprob_token_ids
        assert logprobs[row].top_logprobs == pytest.approx(reported.top_logprobs, abs=1e-5)


def test_a_vocabulary_of_several_slices() -> None:
    logits = randn(3, 9001, seed=1) * 4
    rows = [
        SamplingState(SamplingParams(max_tokens=9, seed=row, **own), [1], [])
        for row, own in enumerate(({}, {"top_p": 0.7, "top_k": 40}, {"temperature": 0.0, "logprobs": 0}))
    ]
    expected, _ = Sampler(TorchKernels(), (EOS,)).sample(logits.clone(), booked(rows))
    found, logprobs = drawn(DeviceSampler((EOS,)), logits, booked(rows))
    assert found.tolist() == expected.tolist()
    assert logprobs[2].logprob == pytest.approx(float(logits[2].log_softmax(0).max()), abs=1e-5)


def test_where_the_noise_alone_decides_and_where_few_tokens_are_left() -> None:
    """In three slices; the bits of the largest sum decide, so every noise that matters is exact."""
    logits = randn(6, 2 * SLICE + 77) * 2
    logits[1, 7:] = -torch.inf
    logits[2:4] = 0
    logits[4] = (logits[4] * 1e4).round()  # beside such sums the noise is rounded
    rows = [SamplingState(SamplingParams(max_tokens=9, seed=3), [1] * (row + 1), []) for row in range(6)]
    expected, _ = Sampler(TorchKernels(), (EOS,)).sample(logits.clone(), booked(rows))
    assert drawn(DeviceSampler((EOS,)), logits, booked(rows))[0].tolist() == expected.tolist()


@pytest.mark.parametrize("own", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-10}, {"temperature": 0.0}])
def test_the_lowest_of_equal_tokens_where_only_the_likeliest_counts(own: dict[str, Any]) -> None:
    logits = torch.zeros(9, VOCAB)
    logits[:, [40, 7, 250]] = 5.0
    logits[8] = 0.0  # all are equal
    rows = [SamplingState(SamplingParams(max_tokens=9, seed=seed, **own), [1], []) for seed in range(9)]
    rows[0] = SamplingState(SamplingParams(max_tokens=9, seed=0, logit_bias={7: 0.0}, **own), [1], [])
    on_host, _ = Sampler(TorchKernels(), (EOS,)).sample(logits.clone(), booked(rows))
    on_device, _ = drawn(DeviceSampler((EOS,)), logits.clone(), booked(rows))
    assert on_host.tolist() == on_device.tolist() == [7] * 8 + [0]


class Allows:
    """A matcher that allows these tokens always."""

    def failure(self, num_outputs: int) -> str:
        return ""

    def __init__(self, *tokens: int) -> None:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[list(tokens)] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        return self._words


def test_rows_that_follow_a_grammar() -> None:
    """Masked as on a CPU, and log probabilities are the model's own."""
    logits = randn(4, VOCAB, seed=2) * 3
    rows = [
        SamplingState(
            SamplingParams(max_tokens=9, seed=row, grammar=b"g", **own), [1], [2], Allows(7, 8, VOCAB - 1)
        )
        for row, own in enumerate(({}, {"temperature": 0.0, "logprobs": 3}, {"top_k": 2, "logprobs": 0}))
    ]
    rows.append(SamplingState(SamplingParams(max_tokens=9, temperature=0.0), [1], [2]))
    expected, expected_logprobs = Sampler(TorchKernels(), (EOS,)).sample(logits.clone(), booked(rows))
    found, logprobs = drawn(DeviceSampler((EOS,)), logits.clone(), booked(rows))
    assert found.tolist() == expected.tolist()
    assert set(found[:3].tolist()) <= {7, 8, VOCAB - 1}
    assert found[3] == logits[3].argmax()
    for row, reported in expected_logprobs.items():
        assert logprobs[row].logprob == pytest.approx(reported.logprob, abs=1e-5)
        assert logprobs[row].top_ids == reported.top_ids


def test_the_chosen_tokens_are_counted_on_the_device() -> None:
    """So that a next step needs no word from the host."""
    params = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0)
    rows = sampling_rows(booked([SamplingState(params, [5], [7, 7])]), (EOS,), VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = Tensor([4.5, 1.2])
    chosen = [int(sample(logits, rows)[0]) for _ in range(3)]
    assert chosen == [7, 7, 9]  # 4.5 - 2, 4.5 - 3, then 4.5 - 4 < 1.2
    assert rows.token_counts[0, [5, 7, 9]].tolist() == [IN_PROMPT, 4, 1]


def test_as_long_as_the_same_sequences_run_what_they_ask_for_stays_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Penalties, biases and min_tokens, too; a step that is run again counts no token twice."""
    made: list[int] = []

    def counted(sampled: SampledRows, *rest: Any) -> SamplingRows:
        made.append(len(sampled.states))
        return sampling_rows(sampled, *rest)

    monkeypatch.setattr(device_sampler, "sampling_rows", counted)
    params = SamplingParams(
        max_tokens=99,
        seed=4,
        temperature=1.5,
        repetition_penalty=1.4,
        frequency_penalty=0.9,
        logit_bias={5: 6.0},
        min_tokens=3,
    )
    rows = [
        SamplingState(params, [5, 6, 6], [7]),
        SamplingState(SamplingParams(max_tokens=99, seed=5), [1], []),
    ]
    kept, logits = DeviceSampler((EOS,)), randn(2, VOCAB, seed=3)
    logits[:, EOS] = 9.0
    for step in range(5):
        for _ in range(2 if step == 3 else 1):  # the fourth is run again
            found = drawn(kept, logits.clone(), booked(rows))[0].tolist()
        expected = Sampler(TorchKernels(), (EOS,)).sample(logits.clone(), booked(rows))[0].tolist()
        assert found == expected, step
        for state, token in zip(rows, expected, strict=True):
            state.output_token_ids.append(token)
    assert made == [2, 2]
    drawn(kept, logits[:1].clone(), booked(rows[:1]))
    assert made == [2, 2, 1]


def test_a_hashed_seed_makes_the_same_keys() -> None:
    for seed, position in ((0, 0), (2**63 - 1, 7), (12345, 100_000)):
        hashed = hashed_seed(seed) & 0xFFFFFFFFFFFFFFFF
        assert noise_key(seed, position) == _key(hashed ^ position)


def _key(z: int) -> tuple[int, int]:
    mask = 0xFFFFFFFFFFFFFFFF
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32
