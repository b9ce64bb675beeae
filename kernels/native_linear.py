"""Matrix products of one linear on CPUs, by C++ or by oneDNN, and measurements that choose among these."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import _cpu
from .measured_choice import NEVER, KernelChoices, fastest
from .native_layers import DTYPE_CODES, address
from .packed_weights import PackedWeights
from .quantised_linear import QuantisedLinear

_sources = sorted((Path(__file__).parent / "cpu").glob("*.*"))  # a wheel has none
_hash = hashlib.sha256(b"".join(file.read_bytes() for file in _sources)).hexdigest()
if _sources and _hash != getattr(_cpu, "SOURCES_HASH", ""):
    raise ImportError("the C++ kernels were built from other sources: python setup.py build_ext --inplace")

PROBE_ROWS, PROBE_SIZE = 32, 768
# see asking_rows in cpu/simd.h; a tile has at most twelve rows
ASKING_ROWS, ALWAYS_ASKING = ((1, 2, 4, 6, 8), 12)
CODED = -1  # in place of a number of parts, see cpu/kernels.h
OF_ONE_THREAD = -1  # a pool of no helpers
STREAMED_COPIES = 56  # of a probe's weights: more than a CPU's caches hold


class NotCodedError(Exception):
    """The weights' exponents differ too much."""


class PackedLinear:
    """Weights in panels of columns, read in one stream. ``rows``: it is used for fewer than that. ``coded``:
    bfloat16 in 12.25 bits without loss (cpu/coded.h), if their exponents allow it."""

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        packed: PackedWeights,
        rows: int = NEVER,
        coded: bool = False,
    ) -> None:
        (self._n, self._k), self._dtype = shape_of(weight), weight[0].dtype
        self._code = DTYPE_CODES[self._dtype]

        def fill(memory: Tensor, coded: bool) -> None:
            parts = [part.contiguous() for part in ([weight] if isinstance(weight, Tensor) else weight)]
            table = np.array([(part.data_ptr(), len(part)) for part in parts], np.int64)
            sizes = (self._n, self._k, self._code, coded, packed.num_threads)
            if not _cpu.pack_linear(table.ctypes.data, memory.data_ptr(), *sizes):
                raise NotCodedError

        def pack(coded: bool) -> Tensor:
            num_bytes = _cpu.packed_bytes(self._n, self._k, self._code, coded)
            return packed.filled(num_bytes, torch.uint8, partial(fill, coded=coded))

        plain, short = (
            _cpu.packed_bytes(self._n, self._k, self._code, as_codes) for as_codes in (False, True)
        )
        self.coded = coded and short > 0 and not packed.has(plain)
        try:
            self._packed = pack(self.coded)
        except NotCodedError:
            self.coded, self._packed = False, pack(False)
        self._bias = None if bias is None else bias.contiguous()
        self.addresses = (self._packed.data_ptr(), CODED if self.coded else 0, address(self._bias))
        self.rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        check_rows(x, self._dtype, self._k)
        y = torch.empty((x.shape[0], self._n), dtype=self._dtype)
        _cpu.linear(x.data_ptr(), *self.addresses, y.data_ptr(), x.shape[0], self._n, self._k, self._code)
        return y


class OneDnnLinear:
    """bfloat16 weights reordered once for the CPU's own bfloat16 instructions; one reordering serves every
    number of rows."""

    ROWS_HINT = 32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class LinearByRows:
    """Few rows by the C++ kernels, many by oneDNN. Each has its own copy of the weights."""

    def __init__(self, few: PackedLinear | QuantisedLinear, many: OneDnnLinear) -> None:
        self.few, self._many = few, many

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if x.shape[0] < self.few.rows else self._many(x)


def measured_instruction_set(choices: KernelChoices) -> str:
    """The one whose products of bfloat16 are fastest, of those with the widest vectors. One thread measures,
    so that the choice does not depend on the number of threads."""
    names = [name for name in _cpu.instruction_sets() if name.startswith("avx512")]
    if len(names) < 2:
        return _cpu.instruction_sets()[0]

    def measure() -> int:
        _cpu.use_thread_pool(OF_ONE_THREAD)
        linears = [_probe(name) for name in names]
        seconds = fastest(linears)
        return seconds.index(min(seconds))

    return names[choices.get("instruction set", measure) % len(names)]


def _probe(name: str) -> Callable[[], None]:
    _cpu.use_instruction_set(name)
    weight = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16)
    linear, x = PackedLinear(weight, None, PackedWeights()), weight[:PROBE_ROWS]

    def run() -> None:
        _cpu.use_instruction_set(name)
        linear(x)

    return run


def measured_asking_rows(choices: KernelChoices, instruction_set: str) -> int:
    """From how many rows on products ask memory for their weights ahead; they do so from now on. One thread
    measures."""

    def measure() -> int:
        _cpu.use_thread_pool(OF_ONE_THREAD)
        part = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16)
        _cpu.use_instruction_set(instruction_set)
        linear = PackedLinear([part] * STREAMED_COPIES, None, PackedWeights())

        def run(rows: int, least: int) -> None:
            _cpu.ask_from_rows(least)
            linear(part[:rows])

        for rows in ASKING_ROWS:
            asking, leaving = fastest([partial(run, rows, 1), partial(run, rows, NEVER)])
            if asking < leaving:
                return rows
        return ALWAYS_ASKING

    rows = choices.get("rows that ask memory ahead", measure)
    _cpu.ask_from_rows(rows)
    return rows


def measured_coding(choices: KernelChoices, instruction_set: str) -> bool:
    """Whether bfloat16 weights are read faster when they are coded: one row and eight together. One thread
    measures."""

    def measure() -> int:
        _cpu.use_thread_pool(OF_ONE_THREAD)
        _cpu.use_instruction_set(instruction_set)
        part = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16)
        forms = [
            PackedLinear([part] * STREAMED_COPIES, None, PackedWeights(), coded=coded)
            for coded in (False, True)
        ]
        if not forms[1].coded:
            return False
        seconds = np.zeros(2)
        for rows in (1, 8):
            seconds += fastest([partial(form, part[:rows]) for form in forms])
        return int(seconds.argmin())

    return bool(choices.get("coded weights", measure))


def shape_of(weight: Tensor | Sequence[Tensor]) -> tuple[int, int]:
    """[outputs, inputs] of one or several weights that become one."""
    parts = [weight] if isinstance(weight, Tensor) else weight
    return sum(len(part) for part in parts), parts[0].shape[1]


def check_rows(x: Tensor, dtype: torch.dtype, columns: int) -> None:
    """Assert what the C++ module believes."""
    found = (x.dtype, x.shape[1], x.is_contiguous())
    assert found == (dtype, columns, True), f"expected {dtype} rows of {columns}, found {found}"
