"""The kernels on CPUs: C++ from cpu/*.h, and oneDNN's matrix products where they are measured to be faster.

The C++ module takes addresses; this file turns tensors into addresses and checks what the module believes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from . import _cpu
from .huge_pages import HugePageArena
from .interface import AttentionInputs, DenseMlp, LayerParts, Linear, RopeInputs, joined
from .measured_choice import NEVER, ROWS, KernelChoices, rows_of_onednn
from .mixture_shape import ACTIVATIONS, Activation, num_inputs
from .mixture_weights import MixtureWeights
from .native_index import index_slots
from .native_layers import (
    DTYPE_CODES,
    NO_WINDOW,
    NativeLayers,
    address,
    cache_codes,
    heads_in_memory,
    layers_in_memory,
)
from .native_linear import OF_ONE_THREAD, LinearByRows, OneDnnLinear, PackedLinear, check_rows, shape_of
from .native_low_rank import NativeLowRank
from .native_mixture import NativeMixture
from .native_states import delta_net, short_conv
from .packed_weights import PackedWeights
from .quantised import QuantisedWeight, Scheme, Weight, parts_of
from .quantised_linear import QuantisedLinear
from .torch_linear import SplitLinear

logger = logging.getLogger(__name__)

MEASURED_WEIGHTS = 1 << 21  # of a linear: more than a core's caches hold


class NativeCpuKernels:
    """See ``interface.Kernels`` for the contracts. Several threads compute at a time if each has kernels of
    another ``rank``, so that they share no pool of helpers."""

    key_group = 16

    def __init__(
        self,
        num_threads: int,
        instruction_set: str,
        onednn_choices: KernelChoices | None = None,
        packed: PackedWeights | None = None,
        quantization: Scheme | None = None,
        codes: bool = False,
        rank: int = 0,
    ) -> None:
        """``onednn_choices``: where bfloat16 products may be oneDNN's, when that is faster. ``quantization``:
        of weights that are not quantised yet. ``codes``: see ``PackedLinear``. ``rank``: the number of the
        pool of helpers."""
        self._choices, self._quantization, self._codes = onednn_choices, quantization, codes
        self._rank, self._num_threads = rank, num_threads
        self._packed = packed or PackedWeights()
        self._adapters = HugePageArena()
        self._panel = _cpu.use_instruction_set(instruction_set)
        self._onednn_rows: dict[str, int] = {}
        self.use_this_thread()

    def use_this_thread(self) -> None:
        """With this rank's helpers."""
        _cpu.use_thread_pool(self._rank)
        _cpu.set_num_threads(self._num_threads)

    def linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None, as_is: bool = False) -> Linear:
        parts = parts_of(weight)
        if 0 < sum(isinstance(part, QuantisedWeight) for part in parts) < len(parts):
            return SplitLinear([self.linear(part, None) for part in parts], bias)
        return self._linear(parts, bias, None if as_is else self._quantization)

    def _linear(self, parts: Sequence[Weight], bias: Tensor | None, quantization: Scheme | None) -> Linear:
        plain = [part for part in parts if isinstance(part, Tensor)]
        rows = self._rows_of_onednn(plain) if plain and quantization is None else NEVER
        if rows == 0:
            return OneDnnLinear(joined(plain), bias)
        own = self._own(parts, bias, quantization, rows)
        return own if rows == NEVER else LinearByRows(own, OneDnnLinear(joined(plain), bias))

    def _own(
        self, parts: Sequence[Weight], bias: Tensor | None, quantization: Scheme | None, rows: int = NEVER
    ) -> PackedLinear | QuantisedLinear:
        """By the C++ kernels. Where one part is quantised and another is not, none is."""
        plain = [part for part in parts if isinstance(part, Tensor)]
        quantised = [part for part in parts if isinstance(part, QuantisedWeight)]
        if not plain:
            return QuantisedLinear(quantised, bias, self._packed, self._panel)
        if quantised:
            plain = [joined(parts).to(plain[0].dtype)]
        if quantization is not None:
            return QuantisedLinear.at_load(
                partial(joined, plain), shape_of(plain), quantization, bias, self._packed, self._panel
            )
        return PackedLinear(plain, bias, self._packed, rows, self._codes)

    def mixture(self, weights: MixtureWeights) -> NativeMixture:
        router = self._own([weights.router], weights.router_bias, None)
        return NativeMixture(
            weights, router, lambda w, bias: self._own(parts_of(w), bias, self._quantization)
        )

    def head(self, weight: Weight) -> Linear:
        if isinstance(weight, QuantisedWeight):
            return self.linear(weight, None)
        return self._linear([weight], None, "int8" if self._quantization in ("int8", "int4") else None)

    def _rows_of_onednn(self, weight: Tensor | Sequence[Tensor]) -> int:
        if self._choices is None or weight[0].dtype != torch.bfloat16:
            return NEVER
        n, k = shape_of(weight)

        def measure() -> int:  # by one thread: what else runs would change the times of several
            torch_threads = torch.get_num_threads()
            _cpu.use_thread_pool(OF_ONE_THREAD)
            torch.set_num_threads(1)
            part = joined(weight)[: max(self._panel, MEASURED_WEIGHTS // k)]
            own = PackedLinear(part, None, PackedWeights(), coded=self._codes)
            onednn = OneDnnLinear(part, None)
            x = {count: torch.ones(count, k, dtype=torch.bfloat16) for count in ROWS}
            limit = rows_of_onednn(lambda count: own(x[count]), lambda count: onednn(x[count]))
            torch.set_num_threads(torch_threads)
            _cpu.use_thread_pool(self._rank)
            return limit

        name = f"{n}x{k}"
        self._onednn_rows[name] = self._choices.get(name, measure)
        return self._onednn_rows[name]

    def low_rank(
        self, in_features: int, out_features: int, max_rank: int, num_slots: int, dtype: torch.dtype,
        device: torch.device,
    ) -> NativeLowRank:  # fmt: skip
        return NativeLowRank(in_features, out_features, num_slots, dtype, self._panel, self._adapters)

    def embedding(self, table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return table.index_select(0, token_ids).to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(None, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        check_rows(x, residual.dtype, residual.shape[-1])
        return self._norm(x, residual, weight, eps)

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        check_rows(gate_up, gate_up.dtype, gate_up.shape[1])
        rows, n = gate_up.shape[0], gate_up.shape[1] // num_inputs(activation)
        y = torch.empty((rows, n), dtype=gate_up.dtype)
        code, dtype = ACTIVATIONS.index(activation), DTYPE_CODES[gate_up.dtype]
        _cpu.gate_mul(gate_up.data_ptr(), y.data_ptr(), rows, n, code, dtype)
        return y

    def rope_and_store(self, qkv: Tensor, pool: Tensor, layer: int, rope: RopeInputs) -> Tensor:
        rows = qkv.shape[0]
        check_rows(qkv, qkv.dtype, (rope.num_heads + pool.shape[2] * rope.num_kv_heads) * rope.head_dim)
        _cpu.rope_and_store(
            qkv.data_ptr(), pool.data_ptr(), rope.cos_sin.data_ptr(), rope.positions.data_ptr(),
            rope.slot_mapping.data_ptr(), address(rope.q_norm), address(rope.k_norm),
            rope.q_norm is not None and rope.q_norm.dim() == 2, rows,
            layers_in_memory(pool), layer, pool.shape[4], rope.num_heads, rope.num_kv_heads,
            *heads_in_memory(pool), rope.head_dim, pool.shape[2], rope.norm_eps,
            *cache_codes(qkv.dtype, pool), address(rope.kv_scales),
        )  # fmt: skip
        return qkv.narrow(1, 0, rope.num_heads * rope.head_dim).view(rows, rope.num_heads, rope.head_dim)

    def paged_attention(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        return self._attention(q, pool, layer, inputs, None)

    def partial_attention(
        self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        lse, empty = torch.empty(q.shape[:2]), (inputs.seq_lens == 0)[:, None]
        tables = inputs.block_tables.masked_fill(empty, 0)  # the C++ needs a key: any will do
        at_least_one = inputs.of(inputs.query_start_loc, inputs.seq_lens.clamp(min=1), tables)
        out = self._attention(q, pool, layer, at_least_one, lse)
        return out.masked_fill_(empty, 0.0), lse.masked_fill_(empty, -torch.inf)

    def _attention(
        self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs, lse: Tensor | None
    ) -> Tensor:
        rows, num_heads, head_dim = q.shape
        assert q.stride()[1:] == (head_dim, 1)
        out = torch.empty((rows, num_heads * head_dim), dtype=q.dtype)
        _cpu.attention(
            q.data_ptr(), q.stride(0), pool.data_ptr(), out.data_ptr(),
            inputs.query_start_loc.data_ptr(), inputs.seq_lens.data_ptr(),
            inputs.block_tables.data_ptr(), address(inputs.sinks), len(inputs.seq_lens),
            inputs.block_tables.shape[1], layers_in_memory(pool), layer, pool.shape[4], num_heads,
            pool.shape[3], *heads_in_memory(pool), head_dim, pool.shape[2],
            NO_WINDOW if inputs.sliding_window is None else inputs.sliding_window, inputs.scale,
            inputs.softcap, *cache_codes(q.dtype, pool), address(inputs.kv_scales), inputs.slots,
            address(lse),
        )  # fmt: skip
        return out

    delta_net, short_conv = staticmethod(delta_net), staticmethod(short_conv)
    index_slots = staticmethod(index_slots)

    def fuse_layers(self, layers: Sequence[LayerParts], eps: float) -> NativeLayers | None:
        if self._choices is not None:
            logger.info("kernels: products %s", products(self._onednn_rows))
        rows, table = NEVER, []
        for layer in layers:
            mlp, linears = layer.mlp, [layer.qkv, layer.o]
            if isinstance(mlp, DenseMlp):
                linears += [mlp.gate_up, mlp.down]
            packed = [own for linear in linears if (own := _packed(linear)) is not None]
            if len(packed) < len(linears):
                return None
            rows = min(rows, *(own.rows for own in packed))
            addresses = [at for own in packed for at in own.addresses]
            mixture = mlp.address if isinstance(mlp, NativeMixture) else 0
            slots = [own.address for own in layer.updates if isinstance(own, NativeLowRank)]
            addresses += [0] * (12 - len(addresses))
            table.append([*addresses, mixture, *slots, *(0,) * (4 - len(slots))])
        updates = [own for layer in layers for own in layer.updates if isinstance(own, NativeLowRank)]
        num_slots = updates[0].num_slots if updates else 0
        return NativeLayers(layers, table, eps, rows, num_slots)

    def gumbel_argmax(self, logits: Tensor, keys: Tensor) -> Tensor:
        check_rows(logits, torch.float32, logits.shape[1])
        chosen = torch.empty(len(logits), dtype=torch.int64)
        _cpu.gumbel_argmax(logits.data_ptr(), keys.contiguous().data_ptr(), chosen.data_ptr(), *logits.shape)
        return chosen

    def _norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        check_rows(residual, weight.dtype, len(weight))
        y = torch.empty_like(residual)
        rows, n = residual.shape
        _cpu.add_rms_norm(
            address(x), residual.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, n, eps,
            DTYPE_CODES[residual.dtype],
        )  # fmt: skip
        return y


def products(onednn_rows: Mapping[str, int]) -> str:
    """Name the kernels of the products, for a log line. ``onednn_rows``: by shape."""
    by_onednn = [f"{name} from {rows} rows" for name, rows in onednn_rows.items() if rows != NEVER]
    return f"in C++, but by oneDNN: {', '.join(by_onednn)}" if by_onednn else "in C++"


def _packed(linear: Linear) -> PackedLinear | QuantisedLinear | None:
    if isinstance(linear, LinearByRows):
        return linear.few
    return linear if isinstance(linear, PackedLinear | QuantisedLinear) else None
