"""Small checkpoints as GGUF files, written by the package ``gguf`` with its names of tensors, and the model
with the weights that it dequantises."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from transformers import PreTrainedModel

Array = NDArray[Any]
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
SIDE_BY_SIDE = ("llama", "granite", "smollm3")
"""Architectures whose converter puts the two numbers side by side that rope rotates."""


def write_gguf(
    path: Path, model: PreTrainedModel, architecture: str, kind_of: Callable[[str], str], **metadata: Any
) -> PreTrainedModel:
    """Write ``model`` to the file ``path``; return it with its dequantised weights. ``kind_of``: the type of
    a matrix, by GGUF's name of it. ``metadata``: further keys of the architecture, with their values."""
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for name, value in metadata.items():
        _add(writer, f"{architecture}.{name}", value)
    _add_rope(writer, c, head_dim)
    add_tokenizer_of(writer, path.parent)
    heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], c.num_hidden_layers)
    state = dict(model.named_parameters())
    for name, tensor in state.items():
        if "experts." in name:
            _add_experts(writer, name, tensor, kind_of)
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        data = tensor.detach().float().numpy()
        count = heads.get(name.split("_proj")[0][-1]) if "_proj" in name else None
        permuted = count if architecture in SIDE_BY_SIDE and "self_attn" in name else None
        data = side_by_side(data, permuted) if permuted else data
        data = data + 1 if "gemma" in architecture and name.endswith("norm.weight") else data
        if data.ndim == 1:
            writer.add_tensor(theirs, data)
            continue
        kind = "F32" if "ffn_gate_inp" in theirs else kind_of(theirs)
        blocks = quantised(data, kind)
        writer.add_tensor(theirs, blocks, raw_dtype=Type[kind])
        wide = gguf.quants.dequantize(blocks, Type[kind]).astype(np.float32)
        wide = halves_apart(wide, permuted) if permuted else wide
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.array(wide)))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return model


def _add_experts(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind_of: Callable[[str], str]
) -> None:
    """Add the tensors of a layer's experts, as the converter makes them, and take their dequantised weights
    over. ``tensor``: [experts, outputs, inputs], outputs of gates before those of ups."""
    _, _, layer, *_, of = name.split(".")
    parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}[of]
    wide = []
    for part, data in zip(parts, tensor.detach().float().chunk(len(parts), dim=1), strict=True):
        theirs = f"blk.{layer}.ffn_{part}_exps.weight"
        kind = kind_of(theirs)
        blocks = quantised(data.reshape(-1, data.shape[-1]).numpy(), kind)
        writer.add_tensor(theirs, blocks.reshape(*data.shape[:2], -1), raw_dtype=Type[kind])
        plain = gguf.quants.dequantize(blocks, Type[kind]).astype(np.float32)
        wide.append(torch.from_numpy(np.array(plain)).view(data.shape))
    with torch.no_grad():
        tensor.copy_(torch.cat(wide, dim=1))


def side_by_side(rows: Array, num_heads: int) -> Array:
    """Return each head's rows i and i + head_dim / 2 one after the other."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def halves_apart(rows: Array, num_heads: int) -> Array:
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def add_tokenizer_of(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """Add the byte-level BPE of a folder's tokenizer.json, with its chat template."""
    fast = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in fast["added_tokens"]}
    vocab = {i: token for token, i in fast["model"]["vocab"].items()}
    vocab |= {i: token["content"] for i, token in added.items()}
    size = max(vocab) + 1
    types = [gguf.TokenType.NORMAL] * size
    for i in range(size):
        if i not in vocab:
            types[i] = gguf.TokenType.UNUSED
        elif i in added:
            types[i] = gguf.TokenType.CONTROL if added[i]["special"] else gguf.TokenType.USER_DEFINED
    ids = {content: i for i, content in vocab.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([vocab.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(types)
    merges = fast["model"]["merges"] or [["a", "b"]]  # the writer wants one; this makes no token
    writer.add_token_merges([" ".join(merge) for merge in merges])
    if "bos_token" in settings:
        writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _add_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, rotated))
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def llama3_factors(rope: dict[str, Any], rotated: int) -> Array:
    """What each frequency is divided by (Llama 3.1)."""
    found = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, rotated, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (i / rotated))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


def quantised(data: Array, kind: str) -> Array:
    """Blocks of this type, uint8 [rows, bytes]; or plain numbers."""
    by_hand = {"Q4_K": q4_k, "Q6_K": q6_k}
    if kind in by_hand:
        blocks = by_hand[kind](data.reshape(-1, 256))
        return blocks.reshape(len(data), -1)
    return gguf.quants.quantize(data, Type[kind])


def q4_k(x: Array) -> Array:
    """d, dmin, eight scales and minimums of 6 bits in 12 bytes, then 4 bits for each number: of 64 numbers
    the first 32 in the low ones."""
    groups = x.reshape(len(x), 8, 32)
    low = np.minimum(groups.min(2), 0)
    scales = (groups.max(2) - low) / 15
    d, least = (_half(of.max(1, keepdims=True) / 63) for of in (scales, -low))
    s, m = _ratio(scales, d, 63), _ratio(-low, least, 63)
    steps = np.where(d * s > 0, d * s, 1)[..., None]
    q = np.clip(np.rint((groups + (least * m)[..., None]) / steps), 0, 15).astype(np.uint8)
    packed = np.concatenate(
        (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4),
        1,
    )
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(x), 128)
    return np.concatenate((_bytes(d), _bytes(least), packed, nibbles), 1)


def q6_k(x: Array) -> Array:
    """Low four bits, high two bits, sixteen scales of 8 bits, d. Of 128 numbers: the low nibbles are those of
    the first 64; each high byte has two bits of four numbers 32 apart."""
    groups = x.reshape(len(x), 16, 16)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)[..., 0]
    scales = extreme / -32
    d = _half(np.abs(scales).max(1, keepdims=True) / 127)
    s = np.clip(np.rint(scales / np.where(d > 0, d, 1)), -128, 127)
    steps = d * s
    q = np.rint(groups / np.where(steps != 0, steps, 1)[..., None])
    q = (np.clip(q, -32, 31) + 32).astype(np.uint8).reshape(len(x), 2, 4, 32)
    low = np.concatenate((q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4,), 2).reshape(len(x), 128)
    high = (q >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8).reshape(len(x), 64)
    return np.concatenate((low, high, s.astype(np.int8).view(np.uint8), _bytes(d)), 1)


def _half(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float32)


def _bytes(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint8)


def _ratio(values: Array, unit: Array, most: int) -> Array:
    return np.clip(np.rint(values / np.where(unit > 0, unit, 1)), 0, most).astype(np.uint8)
