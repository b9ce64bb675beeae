"""The kernels a decoder is made of. One object with these methods per device; the model's code knows no
other.

Activations are [num_tokens, features], contiguous, in the model's dtype. The pool is [num_blocks, num_layers,
2 (K, V) or 1 (each key is its value, too), num_kv_heads, block_size, head_dim] in the same dtype; or in
float8_e4m3fn with ``kv_scales`` (float32 [num_layers, 2, num_kv_heads]): a key is then what the pool holds
times its head's scale; or, on CPUs, in int8: each row of head_dim numbers has its float32 scale behind it, so
that a row is head_dim + INT8_SCALE_BYTES long. Keys may lie grouped: see ``key_group``. On CPUs the pool may
be a view of some heads of a wider one; layers that run in one call (``FusedLayers``) take none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .delta_net import DeltaNetShape, DeltaNetWeights
from .low_rank import LowRank
from .mixture_shape import Activation
from .mixture_weights import Mixture, MixtureWeights
from .quantised import Weight, parts_of
from .short_conv import ShortConvShape, ShortConvWeights
from .state_shape import StatePlace
from .states import StateInputs

INT8_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """
    positions    int32 [num_tokens]
    slot_mapping int64 [num_tokens]               block * block_size + offset
    cos_sin      float32 [max_model_len, head_dim] cosines, then sines
    q_norm       [head_dim] or None               RMSNorm of each head before the rotation (Qwen3); or
                 [num_heads, head_dim]            LayerNorm of each head, each with its weight (Command-R+)
    """

    positions: Tensor
    slot_mapping: Tensor
    cos_sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    kv_scales: Tensor | None = None
    of_step: bool = False  # ``cos_sin`` has the rows of this step's tokens, for all layers


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A model's attention. ``block_size`` in tokens; ``windows``: those of its layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: Sequence[int | None] = (None,)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The sequences of a step, as attention sees them.

    query_start_loc int32 [num_seqs + 1]
    seq_lens        int32 [num_seqs]
    block_tables    int32 [num_seqs, max_blocks]; entries beyond a sequence's last block are never read
    sliding_window  a token sees itself and the sliding_window - 1 tokens before it; None: all
    softcap         scaled scores become softcap tanh(score / softcap); 0: they stay
    max_query_len   of all sequences; None: the host does not know it
    sinks           float32 [num_heads] or None: a score beside those of the keys, with no value (gpt-oss)
    slots           ``block_tables`` are of single tokens: block * block_size + offset of each
    plans           derived from the lengths once for all layers that share a window; lives for one step
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    scale: float
    sliding_window: int | None = None
    softcap: float = 0.0
    kv_scales: Tensor | None = None
    max_query_len: int | None = None
    sinks: Tensor | None = None
    slots: bool = False
    plans: dict[int | str | None, Any] = field(default_factory=dict)

    def of(self, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> AttentionInputs:
        """Return these sequences' inputs, otherwise as these."""
        return replace(
            self, query_start_loc=query_start_loc, seq_lens=seq_lens, block_tables=block_tables, plans={}
        )


class Linear(Protocol):
    """[num_tokens, in_features] -> [num_tokens, out_features]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class RoundingLinear(Linear):
    """A ``Linear`` that rounds its input. The kernel that makes the input does so at once, with the same
    bits: a launch less for each."""

    @abstractmethod
    def of_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Of ``Kernels.add_rms_norm``; without x of ``rms_norm(residual)``."""

    @abstractmethod
    def of_gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Of ``Kernels.gate_mul``."""


def joined(weight: Weight | Sequence[Weight]) -> Tensor:
    """What ``Kernels.linear`` gets, as one matrix; dequantised to float32."""
    wide = [part if isinstance(part, Tensor) else part.dequantised() for part in parts_of(weight)]
    return wide[0] if len(wide) == 1 else torch.cat(wide)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(activation(gate) * up), linears as ``Kernels.linear`` made them."""

    gate_up: Linear
    activation: Activation
    down: Linear
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One decoder layer's weights: norms [hidden_size] or None, linears as ``Kernels.linear`` made them.

    q_norm, k_norm   [head_dim], or of all heads together (``norms_all_heads``), or None
    sinks            see ``AttentionInputs``
    updates          of qkv, o and, if the MLP is dense, gate_up and down; or none
    """

    input_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    norms_all_heads: bool
    cos_sin: Tensor
    o: Linear
    attention_out_norm: Tensor | None
    post_norm: Tensor | None
    mlp: DenseMlp | Mixture
    mlp_out_norm: Tensor | None
    sliding_window: int | None
    sinks: Tensor | None = None
    updates: Sequence[LowRank] = ()


class FusedLayers(Protocol):
    """Several layers in one call, with the bits of the kernels called one by one.

    rows            it is for steps of fewer tokens than that: for more, other products are faster
    """

    rows: int

    def __call__(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        residual: Tensor,
        pool: Tensor,
        rope: RopeInputs,
        attention: AttentionInputs,
        adapters: Tensor | None = None,
    ) -> None:
        """Layers [first, last). ``residual`` [num_tokens, hidden_size] and ``hidden``, the last layer's
        output that is not yet added to it, in place; before layer 0 ``hidden`` means nothing. ``rope`` and
        ``attention`` without what is one layer's own. ``adapters``: slots, see ``LowRank.add``."""


class Kernels(Protocol):
    key_group: int  # tokens whose keys lie item by item, see cpu/kv_codes.h; 1: one after the other

    def use_this_thread(self) -> None:
        """Compute on the calling thread from now on."""
        ...

    def linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None, as_is: bool = False) -> Linear:
        """Prepare weight [out_features, in_features], or several that become one, their outputs side by side.
        Any layout may come of it; the tensors may be dropped afterwards. ``as_is``: it is not quantised at
        load."""
        ...

    def mixture(self, weights: MixtureWeights) -> Mixture:
        """Prepare a layer's experts, one after the other, so that no two need memory in both layouts."""
        ...

    def head(self, weight: Weight) -> Linear:
        """Prepare weight [vocab_size, hidden_size], hidden states to logits: as ``linear``, but never in
        float8, where close logits would change places."""
        ...

    def low_rank(
        self, in_features: int, out_features: int, max_rank: int, num_slots: int, dtype: torch.dtype,
        device: torch.device,
    ) -> LowRank:  # fmt: skip
        """Slots that are all clear. On a GPU their memory is taken now."""
        ...

    def embedding(self, table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of table [vocab_size, hidden_size] as ``dtype``; token_ids int32 [num_tokens]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual)."""
        ...

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[num_tokens, 2 n] -> [num_tokens, n]: activation(gate) * up; or of [num_tokens, n].

        silu          gate / (1 + exp(-gate)) * up
        gelu_tanh     gelu(gate) * up, with the tanh approximation of gelu
        clamped_silu  gate / (1 + exp(-1.702 gate)) * (up + 1), gate at most 7, up from -7 to 7
        relu_squared  max(up, 0)^2, without a gate
        """
        ...

    def rope_and_store(self, qkv: Tensor, pool: Tensor, layer: int, rope: RopeInputs) -> Tensor:
        """Normalise (where asked) and rotate q and k, write k and v to the tokens' slots of ``pool``.

        Returns q [num_tokens, num_heads, head_dim]; ``qkv`` may be overwritten.
        """
        ...

    def paged_attention(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        """Causal attention of each sequence's queries (its last tokens) over its blocks -> [num_tokens,
        num_heads * head_dim]."""
        ...

    def index_slots(
        self, q: Tensor, weights: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs, count: int
    ) -> Tensor:
        """The tokens that sparse attention attends to, see ``sparse_index``: their slots, int32 [num_tokens,
        count]. q [num_tokens, num_heads, head_dim], weights float32 [num_tokens, num_heads]; ``pool``: of the
        index, with one head of keys. Each token sees more than ``count``."""
        ...

    def partial_attention(
        self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """As ``paged_attention``, of sequences with one query each and a part of their keys, which come last
        in the pool's order of blocks or are not there at all; latent vectors only. Returns the log-sum-exp of
        the scaled scores, too: float32 [num_tokens, num_heads]. Of no key it is -inf, and the output 0."""
        ...

    def delta_net(
        self, projected: Tensor, pool: Tensor, place: StatePlace, shape: DeltaNetShape,
        weights: DeltaNetWeights, inputs: StateInputs,
    ) -> Tensor:  # fmt: skip
        """A gated delta net behind its projection, see ``delta_net``: [num_tokens, shape.width] ->
        [num_tokens, num_value_heads * value_dim]. Moves the states in ``pool`` on."""
        ...

    def short_conv(
        self, projected: Tensor, pool: Tensor, place: StatePlace, shape: ShortConvShape,
        weights: ShortConvWeights, inputs: StateInputs,
    ) -> Tensor:  # fmt: skip
        """A short convolution behind its projection, see ``short_conv``: [num_tokens, shape.width] ->
        [num_tokens, channels]. Moves the states in ``pool`` on."""
        ...

    def fuse_layers(self, layers: Sequence[LayerParts], eps: float) -> FusedLayers | None:
        """None where these kernels have nothing better than one call after the other. ``eps``: of the layers'
        norms."""
        ...


@runtime_checkable
class HostKernels(Kernels, Protocol):
    """Kernels that leave sampling to ``Sampler``."""

    def gumbel_argmax(self, logits: Tensor, keys: Tensor) -> Tensor:
        """argmax(logits + noise) by row, int64 [n]; ``gumbel_noise`` gives the noise. logits float32 [n,
        vocab_size], may be overwritten; keys int64 [n, 2]."""
        ...
