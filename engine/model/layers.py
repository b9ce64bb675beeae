"""The linear layers of a decoder, named by how tensor parallelism splits them.

A column layer splits its outputs (whole heads, or columns of the MLP) and needs no communication; a row layer
splits its inputs and ends in a sum over ranks; the vocabulary splits by rows of the table. Model code names
the kind of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ...kernels.interface import ExpertWeights, Kernels, Linear, Mixture, MixtureWeights
from ...kernels.quantised import Weight, selected_rows
from .config import ModelConfig
from .gguf_blocks import QuantisedTable
from .mixture_config import MixtureConfig
from .quantisation import Quantisation
from .quantised_tensors import quantised_weight

ROWS_AT_ONCE = 8192  # of a table that are dequantised
Layer = TypeVar("Layer")


class TensorSource(Protocol):
    """A source of weights: a checkpoint's files, or a benchmark's random numbers."""

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """These tensors will be asked for; raises WeightsError where they are not as expected."""

    def tensor(self, name: str) -> Tensor: ...

    def stored(self, name: str) -> Tensor:
        """Return the tensor in its own type, which may be none of floats."""

    def has(self, name: str) -> bool: ...

    def drop_pages(self) -> None:
        """Give back the memory that reading the tensors so far took."""


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """Makes layers out of a checkpoint's tensors for one device and dtype."""

    checkpoint: TensorSource
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    num_threads: int = 1  # that load layers side by side; kernels on CPUs allow one
    quantisation: Quantisation | None = None  # of the checkpoint
    exact: bool = False  # see kernels/select.py

    @property
    def expands_latent(self) -> bool:
        """Chunks of latent attention may be expanded (``latent_chunks.py``). Not in exact mode: a token's
        bits would depend on its chunk. Not on GPUs, where steps are recorded with no lengths at hand."""
        return self.device.type == "cpu" and not self.exact

    def each(self, make: Callable[[int], Layer], count: int) -> list[Layer]:
        """[make(0), make(1), ...], several at a time."""
        if self.num_threads == 1:
            return [make(i) for i in range(count)]

        def made(i: int) -> Layer:
            with torch.inference_mode():  # a thread's own setting
                return make(i)

        with ThreadPoolExecutor(self.num_threads, "load-weights") as threads:
            return list(threads.map(made, range(count)))

    def column(self, names: Sequence[str], bias: bool, rows: Tensor | None = None) -> Linear:
        """Several projections of one input as one matrix: q, k, v or gate, up, outputs side by side.

        ``rows`` int64 [outputs]: which of the checkpoint's rows is at each place; None: all in order.
        """
        weight = [self._weight(name) for name in names]
        biases = torch.cat([self._tensor(f"{name}.bias") for name in names]) if bias else None
        if rows is not None:
            weight = selected_rows(weight, rows)
            biases = None if biases is None else biases[rows]
        return self._linear(weight, biases)

    def row(self, name: str, bias: bool, centred: bool = False) -> Linear:
        """``centred``: the outputs' mean is subtracted from each."""
        weight, of = self._weight(name), self._tensor(f"{name}.bias") if bias else None
        if centred:
            weight, of = _centred(self._wide(weight)), None if of is None else _centred(of)
        return self._linear(weight, of)

    def _linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None) -> Linear:
        linear = self.kernels.linear(weight, bias)
        self.checkpoint.drop_pages()
        return linear

    def mixture(self, layer: str, config: MixtureConfig) -> Mixture:
        """The experts of the layer of this name."""
        shape, names = config.shape, config.names

        def tensor(of: str) -> Tensor:
            return self._tensor(f"{layer}.{of}")

        def expert(i: int) -> ExpertWeights:
            self.checkpoint.drop_pages()  # of the one before
            parts = [of.format(i) for of in (names.gate, names.up, names.down)]
            gate, up, down = (
                self._weight(f"{layer}.{of}") for of in (parts if i < shape.num_experts else names.shared)
            )
            return ExpertWeights([gate, up], down)

        def part(i: int) -> ExpertWeights:
            """From tensors of all experts: gate and up alternate."""
            self.checkpoint.drop_pages()
            gate_up, down = (self._expert(f"{layer}.{of}", i) for of in (names.gate, names.down))
            if isinstance(gate_up, Tensor):
                return ExpertWeights([gate_up[::2], gate_up[1::2]], down)
            return ExpertWeights([gate_up.rows(slice(first, None, 2)) for first in (0, 1)], down)

        router = tensor(f"{names.router}.weight")
        if shape.gates:
            router = torch.cat((router, tensor(f"{names.shared_gate}.weight")))
        if names.up:
            correction = None
            if config.corrected:
                correction = self.checkpoint.tensor(f"{layer}.{names.correction}").to(self.device).float()
            return self.kernels.mixture(MixtureWeights(shape, router, expert, correction=correction))
        by_turns = tensor(f"{names.gate}_bias")
        biases = (
            tensor(f"{names.router}.bias"),
            torch.cat((by_turns[:, ::2], by_turns[:, 1::2]), dim=1),
            tensor(f"{names.down}_bias"),
        )
        return self.kernels.mixture(MixtureWeights(shape, router, part, *biases))

    def sinks(self, name: str) -> Tensor:
        """float32 [num_heads]."""
        return self.checkpoint.tensor(name).to(self.device, torch.float32)

    def weight(self, name: str) -> Tensor:
        """In the model's type."""
        return self._wide(self._weight(name))

    def differ(self, *names: str) -> bool:
        """Both weights are there, and not the same: config.json calls a head of its own tied."""
        source, full = self.checkpoint, [f"{name}.weight" for name in names]
        found = [source.stored(name) for name in full if source.has(name)]
        return len(found) == 2 and found[0].shape == found[1].shape and not torch.equal(*found)

    def vocabulary_head(self, name: str, table: Tensor | QuantisedTable | None = None) -> Linear:
        """Hidden states to logits. ``table``: the vocabulary's of this name: a GPU holds it once."""
        is_stored = self.quantisation is None or self.quantisation.of(name) is None
        if self.device.type != "cpu" and is_stored and isinstance(table, Tensor):
            return self.kernels.head(table)
        return self.kernels.head(self._weight(name))

    def vocabulary_table(self, name: str) -> Tensor | QuantisedTable:
        """[vocab_size, hidden_size]. On CPUs it stays in the memory map of the weights file, in the file's
        dtype; on GPUs it is in the model's."""
        scheme = None if self.quantisation is None else self.quantisation.of(name)
        if scheme is not None:
            blocks = self.checkpoint.stored(f"{name}.weight")
            if self.device.type == "cpu":
                return QuantisedTable(scheme.kind, blocks)
            parts = torch.split(blocks.to(self.device), ROWS_AT_ONCE)
            tables = (QuantisedTable(scheme.kind, part) for part in parts)
            return torch.cat([table.rows(slice(None)).to(self.dtype) for table in tables])
        table = self.checkpoint.tensor(f"{name}.weight")
        return table if self.device.type == "cpu" else table.to(self.device, self.dtype)

    def kv_scales(self, config: ModelConfig) -> Tensor:
        """float32 [num_layers, 2, num_kv_heads]: the checkpoint's scales, of all heads or of each; 1 where it
        has none."""

        def scale(layer: str, of: str) -> Tensor:
            names = [f"{layer}.{name.format(of)}" for name in config.tensors.kv_scales]
            given = [self.checkpoint.tensor(name).float() for name in names if self.checkpoint.has(name)]
            return (given or [torch.ones(1)])[0].flatten().expand(config.num_kv_heads).to(self.device)

        layers = map(config.tensors.layer.format, range(config.num_layers))
        pairs = [[scale(layer, of) for of in "kv"] for layer in layers]
        return torch.stack([torch.stack(pair) for pair in pairs]).contiguous()

    def norm(self, name: str, offset: float = 0.0) -> Tensor:
        """The weight plus ``offset``, which is added in float32."""
        weight = self._tensor(f"{name}.weight")
        return (weight.float() + offset).to(weight.dtype) if offset else weight

    def _wide(self, weight: Weight) -> Tensor:
        return weight if isinstance(weight, Tensor) else weight.dequantised().to(self.dtype)

    def _weight(self, name: str) -> Weight:
        scheme = None if self.quantisation is None else self.quantisation.of(name)
        if scheme is None:
            return self._tensor(f"{name}.weight")

        def read(of: str) -> Tensor | None:
            full = f"{name}.{of}"
            return self.checkpoint.stored(full).to(self.device) if self.checkpoint.has(full) else None

        return quantised_weight(scheme, read)

    def _expert(self, name: str, i: int) -> Weight:
        """From a tensor of all experts: inputs come before outputs where it is not quantised."""
        scheme = None if self.quantisation is None else self.quantisation.of(name)
        if scheme is None:
            return self.checkpoint.tensor(name)[i].to(self.device, self.dtype).t()
        return quantised_weight(scheme, lambda of: self.checkpoint.stored(f"{name}_{of}")[i].to(self.device))

    def _tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(self.device, self.dtype)


def _centred(outputs: Tensor) -> Tensor:
    """Less their mean."""
    return (outputs.float() - outputs.float().mean(0)).to(outputs.dtype)
