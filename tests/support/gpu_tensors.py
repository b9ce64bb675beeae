"""Tensors of played GPUs: see ``played_gpu``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """A tensor of the played GPU."""

    index = 0
    __torch_function__ = torch._C._disabled_torch_function_impl  # all is decided by the mode


ON_GPUS = [OnGpu, *(type(f"OnGpu{i}", (OnGpu,), {"index": i}) for i in range(1, 4))]
"""Tensors of each of several played GPUs."""


def kind_of(place: Any) -> type[OnGpu]:
    return ON_GPUS[torch.device(place or GPU).index or 0]


def wrapped(result: Any, kind: type[OnGpu]) -> Any:
    if isinstance(result, torch.Tensor):
        return result.as_subclass(kind)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        fields = {field: wrapped(getattr(result, field), kind) for field in result._fields}
        return SimpleNamespace(**fields)
    return type(result)(wrapped(x, kind) for x in result) if isinstance(result, (list, tuple)) else result


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def compiled_for(value: Any, plain: bool) -> str:
    """What Triton compiles a kernel for, of an argument. ``plain``: of its type alone."""
    if isinstance(value, torch.Tensor):
        return f"*{value.dtype}{'' if value.data_ptr() % 16 else ' aligned'}"
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value) if value is None else type(value).__name__
    kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return kind if plain else "1" if value == 1 else f"{kind} by 16" if value % 16 == 0 else kind


def on_host_memory(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, OnGpu) else value
