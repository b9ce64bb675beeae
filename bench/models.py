"""Seeded random checkpoints of a given shape, for benchmarks: no download, the same bytes everywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ..engine.model.config import ModelConfig
from ..engine.model.tensors import expected_tensors
from ..engine.vision.config import vision_config

LLAMA_125M: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


LLAMA_500M: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 5120,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA_TINY: dict[str, Any] = {  # time spent outside the kernels shows
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
IMAGE_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
QWEN_VL_TEXT: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True
    },
}  # fmt: skip
QWEN_VL_VISION: dict[str, Any] = {
    "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "patch_size": 16,
    "out_hidden_size": 768, "deepstack_visual_indexes": [3, 6, 9], "num_position_embeddings": 2304,
}  # fmt: skip
IMAGE_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SHAPES = {"125m": LLAMA_125M, "500m": LLAMA_500M, "tiny": LLAMA_TINY}


def make_random_llama(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **shape: Any) -> None:
    """Writes a Llama checkpoint with a tokenizer to the folder ``path``; ``shape`` overrides fields of
    ``LLAMA_125M``. With ``QWEN3`` it is a Qwen3 one."""
    config, generator = _write_config(path, dtype, shape), torch.Generator().manual_seed(seed)
    with (path / "model.safetensors").open("wb") as file:
        file.write(_header(_tensor_shapes(config), dtype)[0])
        for size in _tensor_shapes(config).values():
            tensor = torch.ones(size)
            if len(size) > 1:
                tensor = torch.randn(size, generator=generator) * size[-1] ** -0.5
            file.write(tensor.to(dtype).view(torch.uint8).numpy().data)


def make_random_qwen_vl(path: Path, seed: int = 0, small: bool = False) -> None:
    """Write a Qwen3-VL in bfloat16: the text model of ``LLAMA_125M``, a vision tower of 135M parameters.
    ``small``: the least of it."""
    text: dict[str, Any] = {**LLAMA_125M, "vocab_size": LLAMA_125M["vocab_size"] + len(IMAGE_MARKS)}
    vision_sizes = dict(QWEN_VL_VISION)
    if small:
        text |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 1}
        text |= {"num_attention_heads": 1}
        vision_sizes |= {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
        vision_sizes |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "text_config": {**text, "head_dim": 64, "max_position_embeddings": 4096, **QWEN_VL_TEXT},
        "vision_config": vision_sizes,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(path, LLAMA_125M["vocab_size"], IMAGE_MARKS)
    vision = vision_config(path, config)
    assert vision is not None, "the tower is one that is built"
    shapes = {**expected_tensors(ModelConfig.from_folder(path)), **vision.expected_tensors()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size)
        if len(size) == 1
        else torch.randn(size, generator=generator) * size[-1] ** -0.5
        for name, size in shapes.items()
    }
    with (path / "model.safetensors").open("wb") as file:
        file.write(_header(shapes, torch.bfloat16)[0])
        for tensor in tensors.values():
            file.write(tensor.bfloat16().view(torch.uint8).numpy().data)


def make_hollow_llama(path: Path, **shape: Any) -> None:
    """The same in bfloat16 with weights of zero, which are a hole in the file: no time and no disk, whatever
    the model's size."""
    header, num_bytes = _header(_tensor_shapes(_write_config(path, torch.bfloat16, shape)), torch.bfloat16)
    with (path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + num_bytes)


def _header(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, int]:
    """The beginning of a safetensors file with these tensors one behind the other, and the bytes of all."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in shapes.items():
        begin, end = end, end + dtype.itemsize * math.prod(size)
        entries[name] = {"dtype": STORED[dtype], "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write_config(path: Path, dtype: torch.dtype, shape: dict[str, Any]) -> dict[str, Any]:
    """And the tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **LLAMA_125M,
        **shape,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(path, int(config["vocab_size"]))
    return config


def _tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            **(
                {f"{layer}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
                if config["model_type"] == "qwen3"
                else {}
            ),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes


def _write_tokenizer(path: Path, vocab_size: int, marks: Sequence[str] = ()) -> None:
    """A byte a token after <unk>, <s>, </s>; the other ids are words ``<n>`` that no text holds but that
    decode to something visible. ``marks``: of images, behind all."""
    symbols = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<{i}>" for i in range(len(symbols), vocab_size)]
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols[:vocab_size])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *marks])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if marks:
        settings["chat_template"] = IMAGE_TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
