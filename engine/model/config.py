"""The model's configuration, from config.json and generation_config.json of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError
from .rope_config import RopeConfig, rope_config, rope_max_model_len

SUPPORTED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 24,
}
"""Several times those of any model: what a config.json claims is believed no further, before its weights bear
it out."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder; families differ in these fields only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # by layer, in tokens; None: full attention
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def max_model_len(self) -> int:
        """Longest sequence (prompt and output) that the model is good for."""
        return rope_max_model_len(self.rope, self.max_position_embeddings)

    @property
    def window(self) -> int:
        """Tokens that a token attends to at most, in any layer; 0: some layer attends to all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if windows and len(windows) == self.num_layers else 0

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Raises ModelConfigError where the folder, its architecture or one of its features cannot be
        served."""
        if not path.is_dir():
            raise ModelConfigError(
                f"{path} is not a folder; give the folder of a Hugging Face checkpoint (with config.json)"
            )
        config = _read_json(path / "config.json")
        generation = (
            _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        )
        try:
            return parse_config(config, generation)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ModelConfigError(
                f"{path / 'config.json'} has a value of the wrong type ({error!r:.200}); download it again"
            ) from error


def parse_config(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    family = _family(config)
    _refuse_unsupported(config)
    num_heads = _positive_int(config, "num_attention_heads")
    num_kv_heads = _positive_int(
        {"num_key_value_heads": config.get("num_key_value_heads") or num_heads}, "num_key_value_heads"
    )
    hidden_size = _positive_int(config, "hidden_size")
    head_dim = _positive_int(
        {"head_dim": config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads)},
        "head_dim",
    )
    num_layers = _positive_int(config, "num_hidden_layers")
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
        )
    if head_dim % 8:
        raise ModelConfigError(
            f"config.json: head_dim {head_dim} is not supported; it must be a multiple of 8"
        )
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=config["architectures"][0],
        vocab_size=_positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_positive_int(config, "max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_windows=_sliding_windows(config, family, num_layers),
        rope=rope_config(config),
        eos_token_ids=_eos_token_ids(config, generation),
        bos_token_id=config.get("bos_token_id"),
    )


def _family(config: dict[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or str(architectures[0]) not in SUPPORTED
    ):
        found = ", ".join(map(str, architectures)) or "none"
        raise ModelConfigError(
            f"config.json: architecture {found} is not supported (supported: {', '.join(SUPPORTED)})"
        )
    return SUPPORTED[str(architectures[0])]


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("quantization_config"):
        raise ModelConfigError(
            "config.json: quantized weights are not supported; use the checkpoint's bf16, f16 or f32 version"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(
            f"config.json: hidden_act {config['hidden_act']!r} is not supported (supported: silu)"
        )


def _sliding_windows(config: dict[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if (
        family == "llama"
        or not window
        or (family.startswith("qwen") and not config.get("use_sliding_window", False))
    ):
        return (None,) * num_layers
    if family == "mistral":
        return (int(window),) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:  # older files: the layers from max_window_layers up slide
        first = int(config.get("max_window_layers", 28))
        return tuple(int(window) if i >= first else None for i in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise ModelConfigError(
            f"config.json: layer_types must name {num_layers} layers, each full_attention or "
            f"sliding_attention; found {len(kinds)} with {', '.join(sorted(set(kinds)))}"
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json decides where it speaks; both may give one id or several."""
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)


def _positive_int(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ModelConfigError(f"config.json: {key!r} must be a positive whole number, found {value!r:.100}")
    if value > LARGEST[key]:
        raise ModelConfigError(
            f"config.json: {key!r} is {value}; the largest that is served is {LARGEST[key]}"
        )
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} does not exist; give the folder of a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} must hold a JSON object")
    return value
