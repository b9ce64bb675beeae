"""config.json of a GGUF file, as the Hugging Face checkpoint that it was made from has it. The keys:
llama.cpp's convert_hf_to_gguf.py and gguf's constants."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NamedTuple

from ..errors import ModelConfigError
from ..model.gguf_types import BLOCKS
from ..model.rope_config import yarn_factor
from .file import GgufFile
from .tensors import FACTORS, tensors_of


class Architecture(NamedTuple):
    """``side_by_side``: rows of Q and K are in the order in which the two numbers that rope rotates follow
    one another, though the family's checkpoints have another."""

    family: str
    side_by_side: bool = False


ARCHITECTURES = {
    "gemma2": Architecture("Gemma2ForCausalLM"),
    "gemma3": Architecture("Gemma3ForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM", side_by_side=True),
    "llama": Architecture("LlamaForCausalLM", side_by_side=True),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", side_by_side=True),
}
MIXTURES = {
    "llama": Architecture("MixtralForCausalLM", side_by_side=True),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM"),
}
"""By the name of the architecture, where the file has experts."""
NUMBERS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window", "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "is_causal": "attention.causal", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
)  # fmt: skip
GEMMAS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of those whose scores are scaled by hidden_size / num_attention_heads, not by head_dim."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json. Raises ModelConfigError."""
    architecture = _architecture(file)
    config: dict[str, Any] = {"architectures": [architecture.family], "model_type": file.architecture}
    for name, key in NUMBERS.items():
        config[name] = _single(file, key, file.own(key))
        if config[name] is None:
            raise ModelConfigError(f"{file.path} has no {file.architecture}.{key}; download it again")
    for name, key in OPTIONAL.items():
        if (value := _single(file, key, file.own(key))) is not None:
            config[name] = value
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if file.own("attention.value_length", head_dim) != head_dim:
        raise ModelConfigError(f"{file.path}: values of another length than keys are not supported")
    tensors = file.tensors
    config["vocab_size"] = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if file.architecture == "qwen3moe":
        config["norm_topk_prob"] = True
    config |= _rope(file, head_dim) | _windows(file, config) | _gemma(file, config)
    if architecture.side_by_side:
        config["rope_interleave"] = True
    if types := _types(file, architecture.family):
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config | _special_ids(file)


def _architecture(file: GgufFile) -> Architecture:
    name, of_experts = file.architecture, bool(file.own("expert_count"))
    known = MIXTURES if of_experts else ARCHITECTURES
    if name in known:
        windows = name == "olmo2" and file.own("attention.sliding_window")  # the name is OLMo 3's, too
        return Architecture("Olmo3ForCausalLM") if windows else known[name]
    nearest = get_close_matches(name, known, n=1, cutoff=0.0)
    raise ModelConfigError(
        f"{file.path}: architecture {name or 'none'}{' of experts' if of_experts else ''} is not supported; "
        f"nearest is {nearest[0] if nearest else 'llama'} (supported: {', '.join(known)})"
    )


def _single(file: GgufFile, key: str, value: Any) -> Any:
    """A number that may be given for each layer. Raises ModelConfigError where layers differ."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ModelConfigError(
            f"{file.path}: {file.architecture}.{key} differs from layer to layer, which is not supported"
        )
    return value[0]


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Rotated numbers and scaling. Llama 3's factors are a tensor, which is read as LongRoPE's."""
    found: dict[str, Any] = {"partial_rotary_factor": file.own("rope.dimension_count", head_dim) / head_dim}
    kind, scaling = file.own("rope.scaling.type", "linear"), dict[str, Any]()
    factor = float(file.own("rope.scaling.factor", file.own("rope.scale_linear", 1.0)) or 1.0)
    attention = file.own("rope.scaling.attn_factor")
    names = [name for name in FACTORS if name in file.tensors]
    if kind not in ("none", "linear", "yarn", "longrope") or (names and factor != 1 and kind != "none"):
        beside = " beside a tensor of factors" if names else ""
        raise ModelConfigError(f"{file.path}: rope scaling {kind!r:.100}{beside} is not supported")
    if names:
        short, long = file.floats(names[0]), file.floats(names[-1])
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        attention = 1.0 if names[0] == FACTORS[0] else attention
    elif kind == "yarn":
        scaling = {"rope_type": kind, "factor": factor}
        for name in ("beta_fast", "beta_slow"):
            scaling[name] = file.own(f"rope.scaling.yarn_{name}")
        given = file.own("rope.scaling.yarn_attn_factor", 1.0)  # 1: often of a key that transformers ignores
        attention = (attention or 1.0) * (yarn_factor(factor) if given == 1 else given)
    elif kind == "linear" and factor != 1:
        scaling = {"rope_type": kind, "factor": factor}
    if not scaling:
        return found
    original = file.own("rope.scaling.original_context_length")
    scaling |= {"attention_factor": attention, "original_max_position_embeddings": original}
    return found | {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


def _windows(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers have a window. OLMo 3 scales the other layers' frequencies only."""
    found: dict[str, Any] = {}
    pattern = file.own("attention.sliding_window_pattern")
    if isinstance(pattern, int):
        found["sliding_window_pattern"] = pattern
    elif pattern is not None:
        found["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    if file.architecture == "gemma3" and not config.get("sliding_window"):
        found["sliding_window_pattern"] = 1
    if file.architecture == "olmo2" and "rope_theta" in config:
        found["rope_local_base_freq"] = config.get("rope_local_base_freq", config["rope_theta"])
    return found


def _gemma(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The file's norms are 1 + weight already."""
    if not file.architecture.startswith("gemma"):
        return {}
    scale = config["head_dim"]
    if GEMMAS_OF_27B[file.architecture] == config["num_hidden_layers"]:
        scale = config["hidden_size"] // config["num_attention_heads"]
    return {"unit_norms": False, "query_pre_attn_scalar": scale}


def _types(file: GgufFile, family: str) -> dict[str, list[str]]:
    """Modules of quantised weights, by type."""
    found: dict[str, list[str]] = {}
    for name, tensor in sorted(tensors_of(file, family).items()):
        if tensor.kind in BLOCKS:
            found.setdefault(tensor.kind, []).append(name.removesuffix(".weight"))
    return found


def _special_ids(file: GgufFile) -> dict[str, Any]:
    """Beside the end of a text all tokens that end a turn: chat models stop at either."""
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = file.get("tokenizer.ggml.tokens", []), file.get("tokenizer.ggml.token_type", [])
    ends += [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (3, 4) and token in ENDS
    ]
    bos = file.get("tokenizer.ggml.bos_token_id")
    return {"bos_token_id": bos, "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
