"""Profiles that are computed from a model's shape and a GPU's name."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.families import FAMILIES, SMALL

from splitserve.engine.analytic.content import CURRENT, ERROR, MODELS
from splitserve.engine.analytic.shapes import shape_of
from splitserve.engine.analytic.step_times import GPUS, Machine
from splitserve.engine.latency_profile import Profile, ProfileError, StepModel
from splitserve.engine.model.config import parse_config
from splitserve.engine.model.tensors import expected_tensors

SHIPPED = [
    *(f"llama-3.1-{size}{q}@{n}x{gpu}" for size in ("8b", "70b") for q in ("", "-fp8") for n in (1, 2, 4, 8)
      for gpu in ("h100", "h200") if (size, n) != ("70b", 1) and (size, q, n, gpu) != ("70b", "", 2, "h100")),
    *(f"{model}@{n}x{gpu}" for model in ("qwen3-30b-a3b", "gpt-oss-120b") for n in (1, 2, 4, 8)
      for gpu in ("h100", "h200")),
]  # fmt: skip
WEIGHTS = {"llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.6e9, "qwen3-32b": 32.8e9, "qwen3-30b-a3b": 30.5e9,
           "qwen3-235b-a22b": 235e9, "gpt-oss-120b": 117e9, "minimax-m2.5": 229e9, "deepseek-v3": 671e9,
           "kimi-k2": 1026e9}  # fmt: skip


def read(name: str) -> Profile:
    return Profile.read(Path(name))


def decode_s(profile: Profile, seqs: int, context: int = 1000) -> float:
    return profile.decode.seconds(seqs, seqs * context, seqs)


def test_every_model_has_as_many_weights_as_its_maker_says() -> None:
    found = {name: shape_of(config).weights for name, config in MODELS.items()}
    assert found == pytest.approx(WEIGHTS, rel=0.01)


@pytest.mark.parametrize(
    "family",
    [
        *("llama2", "qwen3", "mixtral", "qwen2_moe", "deepseek2", "deepseek3", "dots1", "ernie4_5_moe"),
        *("exaone_moe", "glm4_moe", "granite_moe_shared", "hy_v3", "minimax_m2", "olmoe", "solar_open"),
        *("exaone4", "glm4_moe_lite", "kimi_k25", "mistral3", "qwen3_vl_moe", "seed_oss", "youtu"),
        *("deepseek_v32", "glm_moe_dsa"),
    ],
)
def test_a_shape_counts_the_matrices_that_are_loaded(family: str) -> None:
    model, config, sizes = FAMILIES[family]
    options = {**config(**{**SMALL, **sizes}).to_dict(), "architectures": [model.__name__]}
    tensors = expected_tensors(parse_config(options, {}))
    matrices = sum(math.prod(shape) for shape in tensors.values() if len(shape) > 1)
    assert shape_of(options).weights == pytest.approx(matrices, rel=1e-3)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_computed_profile_says_that_it_is_computed_and_what_it_computes_in(name: str) -> None:
    profile = read(name)
    assert profile.source.startswith("computed, not measured")
    assert profile.numerics is not None
    assert profile.numerics.quantization == ("fp8" if "fp8" in name else "none")
    assert profile.gpus == int(name.partition("@")[2].partition("x")[0])
    assert profile.decode.mean_error is not None
    assert profile.power is not None
    assert 0.002 < decode_s(profile, 1) < decode_s(profile, 64) < 0.2


def test_more_gpus_and_fewer_bits_and_a_wider_memory_make_steps_shorter() -> None:
    one = decode_s(read("llama-3.1-8b@h100"), 16)
    for better in ("llama-3.1-8b@2xh100", "llama-3.1-8b-fp8@h100", "llama-3.1-8b@h200"):
        assert decode_s(read(better), 16) < one
    prompt = [read(f"llama-3.1-8b@{n}xh100").prefill.seconds(4096, 4096 * 2048, 1) for n in (1, 2, 4, 8)]
    assert prompt == sorted(prompt, reverse=True)


def test_a_step_of_a_mixture_reads_the_experts_that_its_tokens_use() -> None:
    shape = shape_of(MODELS["qwen3-30b-a3b"])
    assert shape.expert_share(1) == pytest.approx(8 / 128)
    assert shape.expert_share(16) == pytest.approx(1 - (1 - 8 / 128) ** 16)
    assert shape.expert_share(4096) == pytest.approx(1.0)
    assert decode_s(read("qwen3-30b-a3b@h100"), 16, 0) > 1.5 * decode_s(read("qwen3-30b-a3b@h100"), 1, 0)


def test_a_latent_cache_is_small_and_a_window_is_not_read_beyond() -> None:
    deepseek, kimi = shape_of(MODELS["deepseek-v3"]), shape_of(MODELS["gpt-oss-120b"])
    assert deepseek.token_kv * deepseek.layers == 576 * 61
    assert kimi.attended == 0.5


def test_sparse_attention_is_priced_by_what_it_chooses() -> None:
    index = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
    config = MODELS["deepseek-v3"]
    dense, sparse, shared = (
        Machine(shape_of({**config, **of}), GPUS["h200"], 8, 8, CURRENT)
        for of in ({}, index, {**index, "index_topk_freq": 4})
    )
    assert sparse.shape.token_kv == dense.shape.token_kv + 128
    assert shared.shape.indexed == 16 / 61
    assert (sparse.shape.kv_heads, sparse.shape.exchanges) == (1, 0), "blocks are not spread"

    def decode(of: Machine, context: int) -> float:
        return StepModel.model_validate(of.decode()).seconds(64, 64 * context, 64)

    assert decode(dense, 2048) < decode(sparse, 2048) < 1.3 * decode(dense, 2048)
    assert decode(shared, 65536) < decode(sparse, 65536)
    one = (
        Machine(sparse.shape, GPUS["h200"], 1, 8, CURRENT),
        Machine(dense.shape, GPUS["h200"], 1, 8, CURRENT),
    )
    longer = [decode(of, 65536) - decode(of, 2048) for of in one]
    assert longer[0] < 0.5 * longer[1]
    chunks = [StepModel.model_validate(of.prefill()).seconds(4096, 4096 * 65536, 1) for of in one]
    assert chunks[0] < 0.5 * chunks[1]


def test_a_folder_with_a_config_is_a_model_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"]))
    mine, known = read(f"{tmp_path}-fp8@2xl40s"), read("llama-3.1-8b-fp8@2xl40s")
    assert mine.decode == known.decode
    assert mine.memory == known.memory


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-3.1-70b@h100", "take 4 or a smaller"),
        ("llama-31-70b@8xh100", "did you mean llama-3.1-70b"),
        ("llama-3.1-70b@8xh101", f"known are {', '.join(GPUS)}"),
        ("llama-3.1-70b@8 x h100", "write MODEL"),
    ],
)
def test_a_name_that_cannot_be_computed_is_refused_with_what_can(name: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "it lacks 'num_hidden_layers'"),
        ({"text_config": {"linear_num_value_heads": 32}}, "recurrent layers cannot be planned for"),
        ({"conv_L_cache": 3}, "recurrent layers cannot be planned for"),
        ({"layer_types": ["linear_attention"]}, "recurrent layers cannot be planned for"),
        ({"layer_types": ["attention", "mamba"]}, "recurrent layers cannot be planned for"),
    ],
)
def test_a_config_of_no_known_shape_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ProfileError, match=message):
        read(f"{tmp_path}@h100")


def test_measured_steps_of_vllm_are_met_within_a_tenth() -> None:
    """Qwen3-32B in bf16 on a Blackwell GPU, from AIConfigurator's records: prompts of 4,096 tokens, and one
    sequence of 4,096 tokens."""
    for gpus, prompt_s, token_s in (
        (1, 0.2070, 0.0142),
        (2, 0.1144, 0.0091),
        (4, 0.0716, 0.0061),
        (8, 0.0514, 0.0045),
    ):
        profile = read(f"qwen3-32b@{gpus}xb200")
        assert profile.prefill.seconds(4096, 4096 * 4097 / 2, 1) == pytest.approx(prompt_s, rel=0.12)
        assert decode_s(profile, 1, 4096) == pytest.approx(token_s, rel=0.12)


@pytest.mark.parametrize(("gpus", "measured_s"), [(2, 242e-6), (4, 312e-6), (8, 341e-6)])
def test_sums_over_hopper_take_as_long_as_vidur_measured(gpus: int, measured_s: float) -> None:
    """64 MB of Llama-70B's rows, by NCCL."""
    machine = Machine(shape_of(MODELS["llama-3.1-70b"]), GPUS["h100"], gpus, 16, CURRENT)
    assert machine.sums_s(4000) / 2 == pytest.approx(measured_s, rel=0.2)


def test_the_recorded_validation_is_of_these_constants() -> None:
    record = json.loads((Path(__file__).parents[3] / "bench/results/analytic_servers.json").read_text())
    assert record["shipped"] == asdict(CURRENT)
    found = record["servers"]
    assert {name: round(value, 2) for name, value in found["tpot"].items()} == ERROR
    limits = {"ttft": 0.15, "tpot": 0.125, "throughput": 0.125}
    groups = found["by_group"]
    for errors in (groups["all"], groups["half not looked at"], found["left_out"]["all"]):
        assert all(errors[name] < limit for name, limit in limits.items())
    assert found["by_group"]["all"]["ttft"] < 0.14
    assert found["by_group"]["half chosen on"]["ttft"] < 0.13
    assert found["by_group"]["llama-3.1-70b"]["ttft"] < 0.11


def test_a_profile_file_wins_over_a_computed_name(tmp_path: Path) -> None:
    path = tmp_path / "llama-3.1-8b@h100"
    made = read("llama-3.1-8b@h200")
    made.write(path)
    assert Profile.read(path).hardware == made.hardware
    assert isinstance(made.decode, StepModel)
