"""A model whose weights are a table of next tokens, so that real workers give known answers.

Each token has a random embedding of +-1; attention and MLP add nothing. The output weights of a token are the
sum of the embeddings of those that it follows: its logit is HIDDEN after them, and near zero after others.
One dimension is 1 for all tokens. It ranks what a grammar allows where the table's token is forbidden: what
closes comes first, so every schema is answered by the shortest value.

The chat template chooses by its last token: a call of the first tool in SCRIPTS, CITY where a message has a
schema, or TEXT.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, MAX_MODEL_LEN = 512, 131_072
TEXT = ("Hello", " from", " the", " table", ".")
CITY = {"city": "Paris"}
SHELL = "echo splitserve-was-here > note.txt"
SCRIPTS: dict[str, dict[str, object]] = {
    "weather": CITY,
    "Place": CITY,  # instructor, in parallel modes
    "exec_command": {"cmd": SHELL},  # codex
    "bash": {"command": SHELL, "description": "Write a note"},  # opencode
    "Bash": {"command": SHELL, "description": "Write a note"},  # Claude Code
}
CLOSERS = ('"', "}", "]", ":", "{", "[", ",", *"tfn0123456789", *"abcdegh", " ")
"""The order in which bytes are taken where a grammar decides."""
RARE, STEP, LAST = -100.0, 10.0, 250.0
"""Logits where the table has nothing: of most tokens, between two closers, and of the end."""
TEMPLATE = """
{%- if tools %}<|system|>Tools, called as <tool_call>:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|end|>{% endfor %}
{%- if add_generation_prompt %}
{%- set known = NAMES %}{% set chosen = namespace(start='<|text|>') %}
{%- for tool in tools or [] if tool.function.name in known and messages[-1].role != 'tool' %}
{%- if loop.first %}{% set chosen.start = '<|call ' ~ tool.function.name ~ '|>' %}{% endif %}
{%- endfor %}
{%- if not tools and '"properties"' in messages | map(attribute='content') | join %}
{%- set chosen.start = '<|json|>' %}{% endif %}{{ chosen.start }}{% endif %}"""


def write_scripted_model(folder: Path) -> None:
    """Write a checkpoint folder."""
    chains = [["<|text|>", *TEXT, "<|eos|>"], ["<|json|>", '{"city": ', '"Paris"}', "<|eos|>"]]
    for name, arguments in SCRIPTS.items():
        named, rest = f'\n{{"name": "{name}", ', f'"arguments": {json.dumps(arguments)}}}\n'
        chains.append([f"<|call {name}|>", f"<tool_call>{named}", rest, "</tool_call>", "<|eos|>"])
    tokenizer = _tokenizer(chains)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(_weights(tokenizer, chains), folder / "model.safetensors")
    _write_settings(folder, tokenizer)


def _tokenizer(chains: list[list[str]]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = [f"<|{role}|>" for role in ("system", "developer", "user", "assistant", "tool")]
    pieces = dict.fromkeys(piece for chain in chains for piece in chain)
    tokenizer.add_special_tokens(["<|end|>", *roles, *(piece for piece in pieces if piece[:2] == "<|")])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces if piece[:2] != "<|"])
    return tokenizer


def _weights(tokenizer: Tokenizer, chains: list[list[str]]) -> dict[str, torch.Tensor]:
    size = tokenizer.get_vocab_size()
    embeddings = torch.randint(0, 2, (size, HIDDEN), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    embeddings[:, 0] = 1.0
    head = torch.zeros(size, HIDDEN)
    for token, following in dict.fromkeys(pair for chain in chains for pair in pairwise(chain)):
        head[tokenizer.token_to_id(following)] += embeddings[tokenizer.token_to_id(token)]
    head[:, 0] = RARE
    for rank, byte in enumerate(reversed(CLOSERS)):
        head[tokenizer.encode(byte).ids[0], 0] = STEP * rank
    head[tokenizer.token_to_id("<|eos|>"), 0] = LAST
    layer, width = "model.layers.0.", HIDDEN
    shapes = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (width // 8, width),
        "self_attn.v_proj": (width // 8, width), "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (8, width), "mlp.up_proj": (8, width), "mlp.down_proj": (width, 8),
    }  # fmt: skip
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    return {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        **{f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
        **{f"{name}.weight": torch.ones(width) for name in norms},
    }


def _write_settings(folder: Path, tokenizer: Tokenizer) -> None:
    size, eos = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|eos|>")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 1, "vocab_size": size, "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": eos,
    }  # fmt: skip
    settings = {"eos_token": "<|eos|>", "chat_template": TEMPLATE.replace("NAMES", json.dumps(list(SCRIPTS)))}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
