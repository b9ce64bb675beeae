"""Write a Llama checkpoint as GGUF, for a comparison with llama.cpp on the same weights.

    python -m splitserve.bench.peers.gguf_export /tmp/llama-125m --out /tmp/llama-125m.gguf [--type Q8_0]
    llama-server -m /tmp/llama-125m.gguf -t 2 -np 32 -c 65536 --no-cache-prompt --port 8001
    python -m splitserve.bench.peers.peer --url http://127.0.0.1:8001 --name llama.cpp --new-connections

Needs the packages ``gguf`` and ``safetensors``. Norms stay float32; the rows of Q and K are in the order of
GGUF, in which the two numbers that rope rotates lie side by side.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

from ..environment import option_parser

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def export(model: Path, out: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the checkpoint in the folder ``model`` to the file ``out``, its matrices as ``kind``."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, model, config)
    for name, tensor in load_file(model / "model.safetensors").items():
        data = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            data = _side_by_side(data, heads if "q_proj" in name else kv_heads)
        if data.ndim == 2:
            data = gguf.quants.quantize(data, kind)
            writer.add_tensor(_name(name), data, raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    """Return GGUF's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _side_by_side(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows in GGUF's order: of each head, row i and row i + head_dim / 2 follow one another."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, int]) -> None:
    """Add the vocabulary. The prompts of a comparison are token ids, so that merges are not of use."""
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=lambda token: int(vocab[token])))
    special = [gguf.TokenType.CONTROL] * 3
    writer.add_token_types([*special, *[gguf.TokenType.NORMAL] * (len(vocab) - len(special))])
    writer.add_token_merges(["Ġ Ġ"])  # the reader wants one
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path, help="the folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", default="BF16", choices=["F32", "BF16", "F16", "Q8_0", "Q4_0"])
    arguments = parser.parse_args()
    export(arguments.model, arguments.out, gguf.GGMLQuantizationType[arguments.type])


if __name__ == "__main__":
    main()
