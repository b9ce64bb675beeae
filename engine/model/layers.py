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

from ...kernels.interface import Kernels, Linear
from ...kernels.quantised import Weight, selected_columns, selected_rows
from ..errors import ModelConfigError
from .adapters import Part, RankAdapters, Size
from .block_spread import BlockSpread
from .config import ModelConfig
from .gguf_blocks import QuantisedTable
from .quantisation import Quantisation
from .quantised_tensors import quantised_weight
from .ranks import ALONE, Rank
from .split_products import Joined, summed

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
    rank: Rank = ALONE  # whose part of each layer is loaded
    adapters: RankAdapters | None = None
    spread: BlockSpread | None = None  # of latent attention; None: each rank has all blocks

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

    def column(
        self, names: Sequence[str], bias: bool, rows: Tensor | None = None, adapted: Tensor | None = None
    ) -> Linear:
        """Several projections of one input as one matrix: q, k, v or gate, up, outputs side by side.

        ``rows`` int64 [outputs]: which of the checkpoint's rows is at each place; None: all in order.
        ``adapted``: which of an adapter's rows is at each place of the checkpoint.
        """
        weight = [self.stored_weight(name) for name in names]
        sizes = {name: _size(part) for name, part in zip(names, weight, strict=True)}
        biases = torch.cat([self.whole_tensor(f"{name}.bias") for name in names]) if bias else None
        if rows is not None:
            weight = selected_rows(weight, rows)
            biases = None if biases is None else biases[rows]
        linear = self._linear([self.placed(part) for part in weight], biases)

        def part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            b = b if adapted is None else b[adapted]
            return a, b if rows is None else b[rows]

        return self._adapted(linear, sizes, part)

    def row(self, name: str, bias: bool, centred: bool = False) -> Linear:
        """A sum over ranks, or in exact mode a part of the outputs on each (``ranks.py``). ``centred``: the
        mean of all outputs is subtracted from each."""
        rank, weight = self.rank, self.stored_weight(name)
        size, columns, outputs = _size(weight), slice(None), slice(None)
        if rank.size > 1 and not self.exact:
            weight, columns = self.own_columns(weight, name), rank.part(size.num_inputs)
        weight, of = self.placed(weight), self.whole_tensor(f"{name}.bias") if bias else None
        if centred:
            weight, of = _centred(self._wide(weight)), None if of is None else _centred(of)
        if rank.size > 1 and self.exact:
            outputs = rank.part(size.num_outputs)
            weight, of = rows_of(weight, outputs), None if of is None else of[outputs]
        elif rank.number > 0:
            of = None

        def part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a[:, columns], (_centred(b) if centred else b)[outputs]

        linear = self._adapted(self._linear(weight, of), {name: size}, part)
        if rank.size == 1:
            return linear
        return Joined(linear, rank, *size) if self.exact else summed(linear, rank)

    def whole(self, name: str, bias: bool) -> Linear:
        """One that every rank computes."""
        weight = self._weight(name)
        linear = self._linear(weight, self.whole_tensor(f"{name}.bias") if bias else None)
        return self._adapted(linear, {name: _size(weight)}, lambda a, b: (a, b))

    def own_columns(self, weight: Weight, name: str, otherwise: str = "") -> Weight:
        """This rank's part of the inputs. ``otherwise``: an option that needs no such part."""
        if self.rank.size == 1:
            return weight
        part = self.rank.part(_inputs(weight))
        try:
            return selected_columns(weight, part.start, part.stop)
        except ValueError as error:
            raise ModelConfigError(
                f"--tensor-parallel-size {self.rank.size} does not fit the quantised {name}: {error}"
                f"{otherwise and f'; set {otherwise}'}"
            ) from error

    def _linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None) -> Linear:
        linear = self.kernels.linear(weight, bias)
        self.checkpoint.drop_pages()
        return linear

    def _adapted(self, linear: Linear, sizes: Mapping[str, Size], part: Part) -> Linear:
        return linear if self.adapters is None else self.adapters.adapted(linear, sizes, part)

    def sinks(self, name: str) -> Tensor:
        """float32 [num_heads]."""
        sinks = self.checkpoint.tensor(name)
        return sinks[self.rank.part(len(sinks))].to(self.device, torch.float32)

    def own_rows(self, name: str) -> Tensor:
        """This rank's part of a weight, in the model's type."""
        return self._wide(own_part(self._weight(name), self.rank))

    def differ(self, *names: str) -> bool:
        """Both weights are there, and not the same: config.json calls a head of its own tied."""
        source, full = self.checkpoint, [f"{name}.weight" for name in names]
        found = [source.stored(name) for name in full if source.has(name)]
        return len(found) == 2 and found[0].shape == found[1].shape and not torch.equal(*found)

    def vocabulary_head(self, name: str, table: Tensor | QuantisedTable | None = None) -> Linear:
        """Hidden states to logits. ``table``: the vocabulary's of this name: a GPU holds it once."""
        weight: Weight
        is_stored = self.quantisation is None or self.quantisation.of(name) is None
        if self.device.type != "cpu" and is_stored and isinstance(table, Tensor):
            weight = table
        else:
            weight = self.stored_weight(name)
        if self.rank.size > 1:
            weight = rows_of(weight, self.rank.tokens(len(weight)))
        return self.kernels.head(self.placed(weight))

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
        """float32 [layers, 2, num_kv_heads]: the checkpoint's scales, of all heads or of each; 1 where it
        has none."""

        def scale(layer: str, of: str) -> Tensor:
            names = [f"{layer}.{name.format(of)}" for name in config.tensors.kv_scales]
            given = [self.checkpoint.tensor(name).float() for name in names if self.checkpoint.has(name)]
            scales = (given or [torch.ones(1)])[0].flatten().expand(config.num_kv_heads)
            return scales[self.rank.kv_heads(config.num_kv_heads)].to(self.device)

        layers = map(config.tensors.layer_name, range(config.num_layers + config.predicts))
        pairs = [[scale(layer, of) for of in "kv"] for layer in layers]
        return torch.stack([torch.stack(pair) for pair in pairs]).contiguous()

    def norm(self, name: str, offset: float = 0.0) -> Tensor:
        """The weight plus ``offset``, which is added in float32."""
        weight = self.whole_tensor(f"{name}.weight")
        return (weight.float() + offset).to(weight.dtype) if offset else weight

    def _wide(self, weight: Weight) -> Tensor:
        return weight if isinstance(weight, Tensor) else weight.dequantised().to(self.dtype)

    def _weight(self, name: str) -> Weight:
        return self.placed(self.stored_weight(name))

    def placed(self, weight: Weight) -> Weight:
        return weight.to(self.device, self.dtype) if isinstance(weight, Tensor) else weight

    def stored_weight(self, name: str) -> Weight:
        """In the file's own type and memory, if it is not quantised."""
        scheme = None if self.quantisation is None else self.quantisation.of(name)
        if scheme is None:
            return self.checkpoint.tensor(f"{name}.weight")

        def read(of: str) -> Tensor | None:
            full = f"{name}.{of}"
            return self.checkpoint.stored(full).to(self.device) if self.checkpoint.has(full) else None

        return quantised_weight(scheme, read)

    def whole_tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(self.device, self.dtype)


def rows_of(weight: Weight, rows: slice) -> Weight:
    return weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)


def _inputs(weight: Weight) -> int:
    return weight.shape[1] if isinstance(weight, Tensor) else weight.in_features


def _size(weight: Weight) -> Size:
    return Size(_inputs(weight), len(weight))


def own_part(weight: Weight, rank: Rank) -> Weight:
    return weight if rank.size == 1 else rows_of(weight, rank.part(len(weight)))


def _centred(outputs: Tensor) -> Tensor:
    """Less their mean."""
    return (outputs.float() - outputs.float().mean(0)).to(outputs.dtype)
