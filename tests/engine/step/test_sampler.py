"""Samplers follow their formulas, and a row's token depends on nothing but its own state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve.bench.kernels.sampled_rows import booked
from splitserve.engine.step.batch import SamplingState
from splitserve.engine.step.sampler import FilterParams, SampledRows, Sampler, keep_likely_tokens
from splitserve.kernels.gumbel_noise import gumbel_noise, noise_bits, noise_key
from splitserve.kernels.interface import Kernels
from splitserve.kernels.reference import TorchKernels
from splitserve.kernels.select import select_kernels
from splitserve.transport.messages.messages import SamplingParams, TokenLogprobs

EOS = 3
VOCAB = 50


@pytest.fixture(params=["torch", "native"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    kernels: Kernels = TorchKernels() if request.param == "torch" else select_kernels(torch.device("cpu"), 1)
    return Sampler(kernels, (EOS,))


def state(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(max_tokens=99, **params), prompt or [1], output or [])


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def sample(
    sampler: Sampler, logits: Tensor, states: list[SamplingState]
) -> tuple[np.ndarray, dict[int, TokenLogprobs]]:
    return sampler.sample(logits, booked(states))


def draw_many(sampler: Sampler, logits: Tensor, count: int, **params: Any) -> np.ndarray:
    """``count`` independent draws from one row of logits: one seed each."""
    token_ids, _ = sample(
        sampler, logits.repeat(count, 1), [state(seed=seed, **params) for seed in range(count)]
    )
    return token_ids


def chi_square(token_ids: np.ndarray, probabilities: Tensor) -> float:
    """Over its degrees of freedom: about 1 where the draws follow ``probabilities``."""
    expected = probabilities.numpy() * len(token_ids)
    kept = expected > 5
    counts = np.bincount(token_ids, minlength=len(expected))
    return float((((counts - expected) ** 2)[kept] / expected[kept]).sum() / (kept.sum() - 1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(sampler: Sampler, temperature: float) -> None:
    logits = logits_of(seed=1)
    token_ids = draw_many(sampler, logits, 20_000, temperature=temperature)
    assert chi_square(token_ids, torch.softmax(logits[0] / temperature, -1)) < 1.7


def test_draws_at_successive_positions_are_independent() -> None:
    logits = logits_of(seed=2, vocab=4)
    keys = torch.tensor([noise_key(7, position) for position in range(20_000)])
    token_ids = TorchKernels().gumbel_argmax(logits.repeat(len(keys), 1), keys).numpy()
    probabilities = torch.softmax(logits[0], -1)
    assert (
        chi_square(token_ids[:-1] * 4 + token_ids[1:], torch.outer(probabilities, probabilities).flatten())
        < 2.2
    )


@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=6), seed=st.integers(0, 99), data=st.data()
)
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_its_batch(seeds: list[int], seed: int, data: st.DataObject) -> None:
    sampler = Sampler(select_kernels(torch.device("cpu"), 1), (EOS,))
    options = st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.7]),
            "top_k": st.integers(0, 60),
            "top_p": st.floats(0.1, 1.0),
            "min_p": st.floats(0.0, 0.5),
            "repetition_penalty": st.floats(0.5, 2.0),
            "presence_penalty": st.floats(-2.0, 2.0),
            "frequency_penalty": st.floats(-2.0, 2.0),
            "logprobs": st.integers(0, 3),
            "min_tokens": st.integers(0, 3),
        },
    )
    states = [state(prompt=[5, 6], output=[7, 7], seed=s, **data.draw(options)) for s in seeds]
    logits = logits_of(seed, rows=len(seeds))
    together, reported = sample(sampler, logits.clone(), states)
    for row in range(len(seeds)):
        alone, reported_alone = sample(sampler, logits[row : row + 1].clone(), [states[row]])
        assert alone[0] == together[row]
        assert reported_alone.get(0) == reported.get(row)


def test_noise_is_the_documented_integer_hash() -> None:
    """Recomputed here in plain Python integers, from the formula in gumbel_noise.py."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    k0, k1 = noise_key(seed=2**63 - 5, position=1234)
    token_ids = [0, 1, 17, 31999, 151_935]
    expected = [mix(mix(token * 0x9E3779B1 + k0 & 0xFFFFFFFF) ^ k1) for token in token_ids]
    assert noise_bits(torch.tensor([[k0, k1]]), torch.tensor([token_ids])).tolist() == [expected]


def test_noise_is_gumbel_distributed() -> None:
    keys = torch.tensor([noise_key(seed, 5) for seed in range(200)])
    noise = gumbel_noise(keys, torch.arange(1000).unsqueeze(0)).flatten().double()
    assert noise.isfinite().all()
    ranks = torch.exp(-torch.exp(-noise.sort().values))  # uniform, sorted
    assert (ranks - torch.linspace(0, 1, len(ranks))).abs().max() < 0.005  # Kolmogorov-Smirnov


def test_top_k_keeps_k_tokens(sampler: Sampler) -> None:
    logits = logits_of(seed=3)
    likely = logits[0].topk(4).indices
    token_ids = draw_many(sampler, logits, 8000, top_k=4)
    expected = torch.zeros(VOCAB).index_copy(0, likely, logits[0][likely].softmax(-1))
    assert set(token_ids) == set(likely.tolist())
    assert chi_square(token_ids, expected) < 4


def test_min_p_drops_what_is_far_less_likely_than_the_best(sampler: Sampler) -> None:
    logits = logits_of(seed=4)
    probabilities = logits[0].softmax(-1)
    kept = (probabilities >= 0.2 * probabilities.max()).nonzero().flatten().tolist()
    assert set(draw_many(sampler, logits, 4000, min_p=0.2)) == set(kept)


@given(
    seed=st.integers(0, 999),
    vocab=st.integers(2, 2000),
    top_p=st.floats(0.01, 0.999),
    top_k=st.integers(0, 700),
)
@settings(max_examples=80, deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_it(
    seed: int, vocab: int, top_p: float, top_k: int
) -> None:
    row = logits_of(seed, vocab=vocab)[0]
    count = min(top_k or vocab, vocab)
    values, order = row.sort(descending=True)
    probabilities = values[:count].double().softmax(-1)
    needed = int((probabilities.cumsum(0) < top_p).sum()) + 1
    filtered = row.clone()
    keep_likely_tokens(filtered, FilterParams(top_k, top_p, 0.0))
    kept = int(filtered.isfinite().sum())
    assert filtered[order[:kept]].isfinite().all()  # the likeliest ones
    assert kept == pytest.approx(min(needed, count), abs=1)  # rounding may move the last one


def test_repetition_penalty_looks_at_prompt_and_output(sampler: Sampler) -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, 2.5]])
    token_ids, _ = sample(
        sampler, logits, [state(prompt=[0, 2], output=[1], temperature=0.0, repetition_penalty=2.0)]
    )
    assert token_ids[0] == 3
    assert logits[0].tolist() == [2.0, 1.5, -2.0, 2.5]


def test_presence_and_frequency_penalties_look_at_the_output(sampler: Sampler) -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, 2.5]])
    sample(
        sampler,
        logits,
        [state(prompt=[3], output=[0, 0, 1], temperature=0.0, presence_penalty=0.5, frequency_penalty=1.0)],
    )
    assert logits[0].tolist() == [1.5, 1.5, -1.0, 2.5]


def test_logit_bias_is_added(sampler: Sampler) -> None:
    logits = logits_of(seed=5)
    token_ids, _ = sample(sampler, logits, [state(temperature=0.0, logit_bias={11: 100.0})])
    assert token_ids[0] == 11


@pytest.mark.parametrize("stop_ids", [(), (9,)])
def test_min_tokens_holds_back_the_ends(sampler: Sampler, stop_ids: tuple[int, ...]) -> None:
    logits = logits_of(seed=6)
    logits[0, EOS], logits[0, 9], logits[0, 20] = 50.0, 40.0, 30.0
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": stop_ids}
    held, _ = sample(sampler, logits.clone(), [state(output=[1], **params)])
    free, _ = sample(sampler, logits.clone(), [state(output=[1, 1], **params)])
    assert [held[0], free[0]] == [20 if stop_ids else 9, EOS]


def test_logprobs_are_of_the_model_itself(sampler: Sampler) -> None:
    logits = logits_of(seed=7, rows=4)
    expected = logits.log_softmax(-1)
    states = [
        state(temperature=0.3, top_k=2, logprobs=2),
        state(temperature=0.0),
        state(temperature=0.0, logit_bias={8: 99.0}, logprobs=0),
        state(logprobs=0, logprob_token_ids=(5, 1)),
    ]
    token_ids, reported = sample(sampler, logits.clone(), states)
    assert set(reported) == {0, 2, 3}
    assert reported[3].top_ids == (5, 1)
    assert reported[3].top_logprobs == pytest.approx(expected[3, [5, 1]].tolist(), abs=1e-5)
    assert reported[0].logprob == pytest.approx(expected[0, token_ids[0]].item(), abs=1e-5)
    assert reported[0].top_ids == tuple(expected[0].topk(2).indices.tolist())
    assert reported[0].top_logprobs == pytest.approx(expected[0].topk(2).values.tolist(), abs=1e-5)
    assert (token_ids[2], reported[2].top_ids) == (8, ())
    assert reported[2].logprob == pytest.approx(expected[2, 8].item(), abs=1e-5)


def test_greedy_rows_beside_random_ones(sampler: Sampler) -> None:
    logits = logits_of(seed=8, rows=4)
    token_ids, _ = sample(
        sampler, logits.clone(), [state(temperature=t, seed=3) for t in (0.0, 1.0, 0.0, 1.0)]
    )
    assert [token_ids[0], token_ids[2]] == logits[[0, 2]].argmax(-1).tolist()


def test_whether_the_newest_token_is_booked_makes_no_difference(sampler: Sampler) -> None:
    params: dict[str, Any] = {
        "seed": 5,
        "min_tokens": 3,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.4,
    }
    for output in ([7], [7, 7], [7, 9, 8]):
        known = booked([state(prompt=[5, 6], output=output, **params)])
        behind = SampledRows(
            [state(prompt=[5, 6], output=output[:-1], **params)],
            known.positions,
            known.newest,
            known.read_newest,
        )
        logits = logits_of(seed=8)
        edited, edited_behind = logits.clone(), logits.clone()
        assert sampler.sample(edited, known)[0] == sampler.sample(edited_behind, behind)[0]
        assert torch.equal(edited, edited_behind)
