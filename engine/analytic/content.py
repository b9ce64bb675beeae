"""The content of a profile that is computed from its name: ``MODEL[-fp8|-fp4]@[N x]GPU``, such as
``llama-3.1-70b-fp8@8xh100``. MODEL is one of MODELS or a folder with a ``config.json``."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError
from .shapes import Shape, shape_of
from .step_times import GPUS, Gpu, Machine, Software

CURRENT = Software(
    compute=0.60,
    memory=0.80,
    attention=0.64,
    links=0.75,
    layer_s=1.64e-5,
    sum_s=6.5e-6,
    routing_s=3e-5,
    step_s=1.04e-3,
    seq_s=2.3e-5,
    prompt_s=2.4e-3,
    experts=0.30,
)
"""Fitted to vLLM 0.20's measured steps; ``links`` to sums measured on H100s; ``experts``, ``routing_s`` and
shares of single GPUs to measured servers (bench/results/analytic.json)."""
ERROR = {"num_points": 1913, "mean": 0.17, "p95": 0.51, "worst": 1.73}
"""Relative errors of TPOT at AIConfigurator's measured points (the same record); the median is 0.12."""
BITS = {"": 16.0, "-fp8": 8.0, "-fp4": 4.5}
BLOCK_SIZE = 64  # tokens
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights and KV cache."""
ACTIVATIONS = 2e9  # bytes a GPU
NETWORK_SHARE = 0.8
WATTS = {"idle_w": 0.15, "prefill_w": 0.9, "decode_w": 0.6}
"""Shares of the GPU's power limit; splitwise-sim's A100s draw about these."""
_NAME = re.compile(
    r"(?P<model>.+?)(?P<quantization>-fp8|-fp4|)@(?:(?P<gpus>[1-9]\d{0,2})x)?(?P<gpu>[a-z0-9]+)"
)


def content_of(name: str) -> dict[str, Any]:
    """The profile of this name, as its file would hold it. Raises ValueError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name} is no computed profile: write MODEL[-fp8|-fp4]@[N x]GPU without the space, such as "
            "llama-3.1-70b-fp8@8xh100"
        )
    num_gpus, quantization = int(match["gpus"] or 1), match["quantization"]
    gpu = GPUS.get(match["gpu"])
    if gpu is None:
        raise ValueError(f"the GPU {match['gpu']} is not known here; known are {', '.join(GPUS)}")
    shape = _shape(match["model"])
    machine = Machine(shape, gpu, num_gpus, BITS[quantization], CURRENT)
    memory = _memory(name, machine)
    numerics = {"dtype": "bfloat16", "quantization": "fp8" if quantization == "-fp8" else "none"}
    return {
        "name": f"{Path(match['model']).name}{quantization}@{num_gpus}x{match['gpu']}",
        "hardware": f"{num_gpus} x {match['gpu']}",
        "gpus": num_gpus,
        "source": "computed, not measured: from the model's shape and the GPU's published rates, with "
        "overheads fitted to vLLM 0.20",
        "numerics": numerics if quantization != "-fp4" else None,
        "memory": memory,
        "prefill": machine.prefill() | {"residuals": ERROR},
        "decode": machine.decode() | {"residuals": ERROR},
        "handoff": {
            "put_s": 1e-4,
            "bytes_per_s": NETWORK_SHARE * num_gpus * gpu.network,
            "check_bytes_per_s": 1e12,
        },
        "power": {name: share * num_gpus * gpu.watts for name, share in WATTS.items()},
    }


def _shape(model: str) -> Shape:
    """Raises ValueError."""
    path, name = Path(model) / "config.json", Path(model).name
    if name in MODELS and not path.exists():
        return shape_of(MODELS[name])
    try:
        return shape_of(json.loads(path.read_bytes()))
    except OSError:
        near = get_close_matches(model, MODELS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"the model {model} is neither known here nor a folder with a config.json: {hint}known are "
            f"{', '.join(MODELS)}"
        ) from None
    except ModelConfigError as error:
        raise ValueError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is no config.json of a language model known here: it lacks {error}"
        ) from None


def _memory(name: str, machine: Machine) -> dict[str, Any]:
    """Raises ValueError where the weights do not fit."""
    shape, token_bytes = machine.shape, machine.kv_bytes * machine.shape.token_kv * machine.shape.layers
    room = _room(machine, machine.gpus)
    if room <= 0:
        fitting = next((n for n in (1, 2, 4, 8, 16, 32) if _room(machine, n) > 0), 64)
        raise ValueError(
            f"{name}: the weights take {weight_bytes(machine) / 1e9:,.0f} GB, more than {machine.gpus} of "
            f"these GPUs leave; take {fitting} or a smaller -fp8"
        )
    split = min(machine.gpus, shape.kv_heads)
    return {
        "block_size": BLOCK_SIZE,
        "num_blocks": int(room / machine.gpus * split / (token_bytes * BLOCK_SIZE)),
        "block_bytes": token_bytes * BLOCK_SIZE,
        "num_layers": shape.layers,
        "max_model_len": shape.max_model_len,
    }


def _room(machine: Machine, num_gpus: int) -> float:
    """Bytes that ``num_gpus`` GPUs leave for the KV cache."""
    gpu: Gpu = machine.gpu
    return num_gpus * (MEMORY_SHARE * gpu.memory - ACTIVATIONS) - weight_bytes(machine)


def weight_bytes(machine: Machine) -> float:
    """Bytes of all weights; embeddings and the output head are never quantised."""
    shape, bits = machine.shape, machine.bits
    routed = shape.experts * shape.expert * (shape.expert_bits or bits)
    return shape.layers * (shape.dense * bits + routed) / 8 + 2 * (shape.head + shape.embedding)


_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
_QWEN3_MOE = {**_QWEN3, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
}  # fmt: skip


def _numbers(layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **others}


MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _numbers(32, 4096, 32, intermediate_size=14336, **_LLAMA),
    "llama-3.1-70b": _numbers(80, 8192, 64, intermediate_size=28672, **_LLAMA),
    "qwen3-32b": _numbers(64, 5120, 64, num_key_value_heads=8, intermediate_size=25600, **_QWEN3),
    "qwen3-30b-a3b": _numbers(48, 2048, 32, moe_intermediate_size=768, **_QWEN3_MOE),
    "qwen3-235b-a22b": _numbers(94, 4096, 64, moe_intermediate_size=1536, **_QWEN3_MOE),
    "gpt-oss-120b": _numbers(
        36, 2880, 64, num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=128,
        num_experts_per_tok=4, vocab_size=201088, max_position_embeddings=131072,
        layer_types=["sliding_attention", "full_attention"] * 18,
        quantization_config={"quant_method": "mxfp4"},
    ),
    "minimax-m2.5": _numbers(
        62, 3072, 48, num_key_value_heads=8, head_dim=128, intermediate_size=1536, num_local_experts=256,
        num_experts_per_tok=8, vocab_size=200064, max_position_embeddings=196608,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": {
        **_DEEPSEEK_V3, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
        "vocab_size": 163840, "max_position_embeddings": 262144,
    },
}  # fmt: skip
