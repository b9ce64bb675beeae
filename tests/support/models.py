"""Small seeded random checkpoints of every supported family, written as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from .families import ALL_FAMILIES, SMALL


def make_checkpoint(
    path: Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> PreTrainedModel:
    """Writes the folder and returns the transformers model it was written from (in ``dtype``, ready to
    infer)."""
    model_class, config_class, own = ALL_FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SMALL, **own, **changes}))
    make_decisive(model, seed)
    model = model.to(dtype).eval()
    model.save_pretrained(path, max_shard_size=max_shard_size)
    name_as_published(path, family)
    write_byte_tokenizer(path)
    return model


def name_as_published(path: Path, family: str) -> None:
    """Name and cut tensors as published, where transformers saves them otherwise."""
    if family == "kimi_k25":
        _name_layers(path / "model.safetensors")
    if family == "qwen3_vl_moe":
        _transpose_experts(path / "model.safetensors")
    if family == "qwen3_5_moe_images":
        _stack_experts(path / "model.safetensors")
    if family == "olmo_hybrid":
        _name_norms_and_cut_convolutions(path / "model.safetensors")


def _name_layers(file: Path) -> None:
    """Rename tensors as published: transformers saves the text's layers by the name of the images' layers,
    and the patches' as if they were a part of these."""
    wrong = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    tensors = load_file(file)
    for theirs, right in wrong.items():
        assert any(name.startswith(theirs) for name in tensors)
        tensors = {name.replace(theirs, right): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)


def _transpose_experts(file: Path) -> None:
    """Put inputs before outputs, as published; transformers does so only where it has loaded the model."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file)


def _stack_experts(file: Path) -> None:
    """Put those of all experts in one tensor, as published; transformers saves each expert's apart."""
    tensors = load_file(file)
    first = [name for name in tensors if ".mlp.experts.0.gate_proj." in name]
    assert first
    for layer in [name.partition("0.gate_proj.")[0] for name in first]:
        count = sum(name.startswith(layer) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}{i}.{of}_proj.weight") for i in range(count)])
            for of in ("gate", "up", "down")
        )
        tensors |= {f"{layer}gate_up_proj": torch.cat((gate, up), dim=1), f"{layer}down_proj": down}
    save_file(tensors, file)


def _name_norms_and_cut_convolutions(file: Path) -> None:
    """Name tensors as published: transformers saves norms by other names, and thirds of the convolution in
    place of q's, k's and v's channels."""
    right = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    tensors = load_file(file)
    assert all(any(wrong in name for name in tensors) for wrong in right)
    for wrong, name in right.items():
        tensors = {of.replace(f".{wrong}.", f".{name}."): tensor for of, tensor in tensors.items()}
    for name in list(tensors):
        layer, _, of = name.rpartition(".linear_attn.q_proj")
        if of and layer:
            names = [f"{layer}.linear_attn.{of}_conv1d.weight" for of in "qkv"]
            sizes = [len(tensors[f"{layer}.linear_attn.{of}_proj.weight"]) for of in "qkv"]
            parts = torch.cat([tensors[of] for of in names]).split(sizes)
            tensors |= {of: part.contiguous() for of, part in zip(names, parts, strict=True)}
    save_file(tensors, file)


def write_byte_tokenizer(path: Path) -> None:
    """One token a byte, then <bos>, <eos>, <eot>; and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<eot>"])
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if "
        "add_generation_prompt %}assistant: {% endif %}"
    )
    settings = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def make_decisive(model: PreTrainedModel, seed: int) -> None:
    """Spread the logits: freshly initialised models rate all tokens nearly the same, so that any rounding
    changes the argmax. Where the embeddings are the head, too, they are small beside what layers add: each
    token would else be followed by itself, whatever the layers do."""
    generator = torch.Generator().manual_seed(seed + 1)
    tied = 64 if model.get_output_embeddings().weight is model.get_input_embeddings().weight else 1
    with torch.no_grad():
        for name, tensor in model.named_buffers():  # routers' corrections, of some families; zero at first
            if name.endswith("bias"):
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
            if name.endswith("layer_scalar"):
                tensor.uniform_(0.5, 1.2, generator=generator)
        for name, tensor in model.named_parameters():
            if any(part in name for part in ("vision", "visual", "projector")):
                continue
            if name.endswith("per_expert_scale"):  # powers of two: experts times these round as they do alone
                tensor.copy_(2.0 ** torch.randint(-1, 2, tensor.shape, generator=generator))
            elif name.endswith(
                (".D", "scale", *(f"norm{of}.weight" for of in ("", "1", "2", "_1", "_2", "_f")))
            ):
                tensor.copy_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith("A_log"):  # some heads forget at once, others hardly
                tensor.uniform_(-5, 1, generator=generator)
            elif name.endswith("sinks"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            elif name.endswith("bias"):
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
            elif "embed" in name or "lm_head" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / tied)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 1.5 * tensor.shape[1] ** -0.5)
            if name.endswith(("model.norm.weight", "embedding_norm.weight")):
                tensor.mul_(tied)
