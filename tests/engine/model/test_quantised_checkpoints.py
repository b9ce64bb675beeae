"""Checkpoints of quantised weights in each format are the functions of their dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_checkpoint
from support.quantised_checkpoints import (
    GROUP,
    SIDES,
    Written,
    awq,
    by_block,
    float8,
    gptq,
    int8,
    packed,
    rewrite,
    rewrite_experts_in_mxfp4,
)
from support.quantised_models import assert_exact, assert_same_function, make_runner
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config

from splitserve.engine.errors import ModelConfigError, WeightsError
from splitserve.engine.model.model_folder import check_model_folder
from splitserve.engine.model.quantisation import parse_quantisation

Case = tuple[dict[str, Any], Callable[[Tensor], Written]]


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def words_of(bits: int, group: int, symmetric: bool = True, act_order: bool = False) -> Case:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or -1,
        "actorder": "group" if act_order else None,
    }
    write = partial(packed, bits=bits, group=group, symmetric=symmetric, act_order=act_order)
    return compressed("pack-quantized", weights), write


def gptq_of(bits: int, symmetric: bool, act_order: bool, v2: bool = False) -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}
    write = partial(gptq, bits=bits, symmetric=symmetric, act_order=act_order, v2=v2)
    return {**config, "checkpoint_format": "gptq_v2" if v2 else "gptq"}, write


def whole(weight: Tensor, inverse: bool = False) -> Written:
    scale = weight.abs().max() / 448
    names = ("weight_scale_inv", "activation_scale") if inverse else ("weight_scale", "input_scale")
    written, wide = float8(weight, scale, names[0], scale)
    return {**written, names[1]: torch.tensor(0.5)}, wide


def by_row(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 448
    return float8(weight, scales, "weight_scale", scales)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
CASES: dict[str, Case] = {
    "compressed-tensors W4A16": words_of(4, GROUP),
    "compressed-tensors W4A16 with zeros": words_of(4, 32, symmetric=False),
    "compressed-tensors W4A16 in act-order": words_of(4, GROUP, act_order=True),
    "compressed-tensors W8A16 by row": words_of(8, 0),
    "compressed-tensors W8A16 by group": words_of(8, 32),
    "compressed-tensors FP8 dynamic": (
        compressed(
            "float-quantized", {**FLOAT8, "strategy": "channel"}, {"dynamic": True, "strategy": "token"}
        ),
        by_row,
    ),
    "compressed-tensors FP8 static": (
        compressed("float-quantized", {**FLOAT8, "strategy": "tensor"}, {"dynamic": False}),
        whole,
    ),
    "compressed-tensors int8 weights": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
        int8,
    ),
    "GPTQ": gptq_of(4, symmetric=True, act_order=False),
    "GPTQ with zeros": gptq_of(4, symmetric=False, act_order=False),
    "GPTQ in act-order": gptq_of(4, symmetric=True, act_order=True),
    "GPTQ v2 of 8 bits": gptq_of(8, symmetric=False, act_order=True, v2=True),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "FP8 in blocks": ({"quant_method": "fp8", "weight_block_size": SIDES}, by_block),
    "FP8 by matrix": ({"quant_method": "fp8", "weight_block_size": None}, partial(whole, inverse=True)),
    "ModelOpt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, whole),
}


@pytest.mark.parametrize(
    ("family", "case"),
    [("glm4" if "AWQ" in case else "llama3", case) for case in CASES]
    + [("cohere_plus", "compressed-tensors W4A16")],
)
def test_a_checkpoint_is_the_function_of_its_dequantised_weights(
    tmp_path: Path, family: str, case: str, tried: Callable[[str, str, str], None]
) -> None:
    config, write = CASES[case]
    tried(family, "checkpoint", case)
    torch.manual_seed(1)
    reference = rewrite(tmp_path, make_checkpoint(tmp_path, family, num_hidden_layers=2), config, write)
    check_model_folder(tmp_path)
    assert_same_function(make_runner(tmp_path), reference)


def test_inputs_of_w8a8_are_rounded_to_int8(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config = compressed("int-quantized", weights, {"num_bits": 8, "dynamic": True, "strategy": "token"})
    model = make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    reference = rewrite(tmp_path, model, config, int8)

    def round_inputs(module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        scales = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / scales).round() * scales,)

    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(round_inputs)
    assert_same_function(make_runner(tmp_path), reference, most=5e-2)


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    reference = rewrite(tmp_path, model, {}, whole)
    described = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    assert_same_function(make_runner(tmp_path), reference)


MIXTURES = (
    *(("glm4_moe_norms", "compressed-tensors FP8 dynamic"), ("minimax_m2", "FP8 in blocks")),
    ("qwen3_moe", "FP8 in blocks"),
    ("qwen3_moe", "compressed-tensors FP8 dynamic"),
    ("qwen3_moe", "compressed-tensors W4A16"),
    ("qwen3_moe", "compressed-tensors W8A16 by row"),
    ("qwen2_moe", "compressed-tensors int8 weights"),
    ("qwen2_moe", "GPTQ in act-order"),
    *(("mixtral", case) for case in ("GPTQ with zeros", "AWQ", "ModelOpt FP8")),
    ("deepseek2", "GPTQ in act-order"),
    ("deepseek3", "FP8 in blocks"),
    ("deepseek3", "compressed-tensors W4A16"),
    ("deepseek3", "AWQ"),
)


@pytest.mark.parametrize(("family", "case"), MIXTURES)
def test_experts_of_a_checkpoint(
    tmp_path: Path, family: str, case: str, tried: Callable[[str, str, str], None]
) -> None:
    """Those of all tokens are quantised, too; routers are not."""
    tried(family, "checkpoint", case)
    sizes = ["intermediate_size"] if family in ("mixtral", "minimax_m2") else ["moe_intermediate_size"]
    sizes += {"qwen2_moe": ["shared_expert_intermediate_size"], "deepseek3": ["q_lora_rank"]}.get(family, [])
    latent = {"v_head_dim": 16} if "deepseek" in family else {}
    model = make_checkpoint(tmp_path, family, **dict.fromkeys(sizes, 48), **latent)
    reference = rewrite(tmp_path, model, *CASES[case])
    check_model_folder(tmp_path)
    runner = make_runner(tmp_path)
    assert (runner._model._fused is None) == bool(latent)
    assert_same_function(runner, reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "case"),
    [("qwen3_moe", "FP8 in blocks"), ("qwen3_moe", "GPTQ in act-order"), ("deepseek3", "FP8 in blocks")],
)
def test_experts_of_a_checkpoint_in_exact_mode(tmp_path: Path, family: str, case: str, dtype: str) -> None:
    model = make_checkpoint(tmp_path, family, moe_intermediate_size=48)
    rewrite(tmp_path, model, *CASES[case])
    assert_exact(tmp_path, dtype)


def test_gpt_oss_in_mxfp4_is_the_function_that_transformers_dequantises(
    tmp_path: Path, tried: Callable[[str, str, str], None]
) -> None:
    tried("gpt_oss", "checkpoint", "MXFP4")
    rewrite_experts_in_mxfp4(tmp_path, make_checkpoint(tmp_path, "gpt_oss"))
    check_model_folder(tmp_path)
    reference = GptOssForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    runner = make_runner(tmp_path)
    assert runner._model._fused is not None
    assert_same_function(runner, reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_in_exact_mode(tmp_path: Path, dtype: str) -> None:
    rewrite_experts_in_mxfp4(tmp_path, make_checkpoint(tmp_path, "gpt_oss"))
    assert_exact(tmp_path, dtype)


def test_experts_in_one_tensor_of_another_scheme_are_refused(tmp_path: Path) -> None:
    rewrite_experts_in_mxfp4(tmp_path, make_checkpoint(tmp_path, "gpt_oss", num_hidden_layers=1))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": CASES["GPTQ"][0]}))
    with pytest.raises(
        ModelConfigError, match=r"experts .* in one tensor .*gate_up_proj. in the form 'gptq'"
    ):
        check_model_folder(tmp_path)


def with_whole_scales(weight: Tensor) -> Written:
    return {**by_row(weight)[0], "weight_scale": torch.ones(len(weight), 1, dtype=torch.uint8)}, weight


@pytest.mark.parametrize("write", [int8, with_whole_scales])
def test_weights_of_another_type_than_config_json_names_are_refused(
    tmp_path: Path, write: Callable[[Tensor], Written]
) -> None:
    """Codes would be taken for other numbers."""
    model = make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    rewrite(tmp_path, model, CASES["compressed-tensors FP8 dynamic"][0], write)
    with pytest.raises(WeightsError, match=r"weights with torch.* scales are not those of config\.json"):
        make_runner(tmp_path)


def test_a_name_comes_before_a_class_of_modules() -> None:
    config, _ = words_of(4, GROUP)
    eight = words_of(8, GROUP)[0]["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**eight, "targets": ["re:.*down_proj"]}
    quantisation = parse_quantisation(config, {})
    assert quantisation is not None
    found = [quantisation.of(f"model.layers.0.mlp.{name}_proj") for name in ("up", "down")]
    assert [scheme and scheme.bits for scheme in found] == [4, 8]


def test_gptq_leaves_out_what_its_dynamic_names(tmp_path: Path) -> None:
    config, _ = CASES["GPTQ"]
    quantisation = parse_quantisation({**config, "dynamic": {r"-:.*\.mlp\.up_proj": {}}}, {})
    assert quantisation is not None
    assert quantisation.of("model.layers.0.mlp.up_proj") is None
    assert quantisation.of("model.layers.0.mlp.down_proj") is not None


@pytest.mark.parametrize("pattern", ["model.layers.0.mlp", "re:.*[.]mlp[.].*", "*.mlp.*", "mlp"])
def test_modules_that_are_left_out(pattern: str) -> None:
    config, _ = words_of(4, GROUP)
    quantisation = parse_quantisation({**config, "ignore": [pattern]}, {})
    assert quantisation is not None
    assert quantisation.of("model.layers.0.mlp.down_proj") is None
    assert quantisation.of("model.layers.0.self_attn.q_proj")
    assert quantisation.of("model.embed_tokens") is None


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' .known: compressed-tensors"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"a": 1}}, "schemes by module"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "AWQ .* 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "float8 in e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' of ModelOpt"),
        (compressed("nvfp4-pack-quantized", {**FLOAT8, "num_bits": 4, "strategy": "group"}), "format 'nvfp4"),
        ({**compressed("pack-quantized", {}), "transform_config": {"config_groups": {"u": {}}}}, "rotations"),
        (compressed("marlin-24", {**FLOAT8, "strategy": "channel"}), "format 'marlin-24'"),
    ],
)  # fmt: skip
def test_an_unknown_scheme_is_refused_by_name(config: dict[str, Any], answer: str) -> None:
    with pytest.raises(ModelConfigError, match=answer):
        parse_quantisation(config, {})


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    rewrite(tmp_path, model, *CASES["AWQ"])
    with pytest.raises(ModelConfigError, match="quantised already: leave out --quantization"):
        make_runner(tmp_path, quantization="int8")
