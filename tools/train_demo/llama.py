"""The Llama architecture for training on a CPU; its parameters carry the names of the Hugging Face
checkpoint.

Only what the demo model needs: grouped-query attention, rotate-half RoPE, SwiGLU, tied embeddings, no cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of the model, in the words of Hugging Face's LlamaConfig."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, length, head_dim]
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return merged


class Mlp(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class Body(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """`model.` and what follows in every parameter's name is the checkpoint's name for it; the head is the
    embedding."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)  # every layer starts as the identity

    def hidden(self, tokens: Tensor) -> Tensor:
        """[batch, length] token ids to the normed last hidden states [batch, length, hidden_size]."""
        x = self.model.embed_tokens(tokens)
        cos, sin = rotations(tokens.shape[1], self.shape)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def rotations(length: int, shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of RoPE, each [length, head_dim]; both halves of a head turn by the same
    angles."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
