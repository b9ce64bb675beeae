"""Writes the trained model as a Hugging Face checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from train_demo.llama import Llama
from train_demo.tokenizer import END_OF_TEXT, END_OF_TURN


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors (bfloat16); the tokenizer's own files are
    there already."""
    shape = model.shape
    end_of_text, end_of_turn = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "torch_dtype": "bfloat16",
    }
    generation = {
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.9,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
