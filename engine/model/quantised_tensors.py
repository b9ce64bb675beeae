"""Quantised weights out of a checkpoint's tensors: see ``quantisation.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.quantised import QuantisedWeight
from ..errors import WeightsError
from .gguf_blocks import weight_of_blocks
from .quantisation import WORD_BITS, TensorScheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word hold
Reader = Callable[[str], Tensor | None]
"""The tensor of this name within the layer's, as it is stored; None: it is not there."""


def quantised_weight(scheme: TensorScheme, read: Reader) -> QuantisedWeight:
    readers = {
        "packed": _packed, "gptq": _gptq, "awq": _awq, "plain": _plain, "mxfp4": _mxfp4, "gguf": _gguf
    }  # fmt: skip
    return readers[scheme.form](scheme, read)


def _packed(scheme: TensorScheme, read: Reader) -> QuantisedWeight:
    codes = _unpacked(_needed(read, "weight_packed"), scheme.bits)
    zeros = None
    if not scheme.symmetric:
        zeros = _unpacked(_needed(read, "weight_zero_point").T.contiguous(), scheme.bits).T.float()
    scales = _needed(read, scheme.scale).float()
    return _grouped(scheme, codes, scales, zeros, read("weight_g_idx"))


def _gptq(scheme: TensorScheme, read: Reader) -> QuantisedWeight:
    codes = _unpacked(_needed(read, "qweight").T.contiguous(), scheme.bits)
    zeros = _unpacked(_needed(read, "qzeros"), scheme.bits).T.float()
    if not scheme.v2:
        zeros = zeros + 1  # the largest stored one stands for the next power of 2
    return _grouped(scheme, codes, _needed(read, "scales").T.float(), zeros, read("g_idx"))


def _awq(scheme: TensorScheme, read: Reader) -> QuantisedWeight:
    codes, zeros = (_in_order(_unpacked(_needed(read, of), 4)) for of in ("qweight", "qzeros"))
    return _grouped(scheme, codes.T, _needed(read, "scales").T.float(), zeros.T.float(), None)


def _plain(scheme: TensorScheme, read: Reader) -> QuantisedWeight:
    codes, scales = _needed(read, "weight"), _needed(read, scheme.scale)
    wanted = torch.float8_e4m3fn if scheme.float8 else torch.int8
    if codes.dtype != wanted or not scales.is_floating_point():
        found = f"{codes.dtype} weights with {scales.dtype} scales"
        raise WeightsError(f"{found} are not those of config.json ({wanted}); use another version")
    rows, columns = codes.shape
    group, scales = columns, scales.float()
    if scheme.block is not None:
        scales = scales.repeat_interleave(scheme.block[0], 0)[:rows]
        group = min(scheme.block[1], columns)
    scales = scales.reshape(1, 1).expand(rows, 1) if scales.numel() == 1 else scales.view(rows, -1)
    if not scheme.float8:
        codes = codes.view(torch.uint8) ^ 128
    return QuantisedWeight(codes, scales.contiguous(), columns, group, 8, rounds_x=scheme.rounds_x)


def _mxfp4(scheme: TensorScheme, read: Reader) -> QuantisedWeight:
    codes, exponents = _needed(read, "blocks").flatten(1), _needed(read, "scales")
    scales = exponents.view(torch.float8_e8m0fnu).float()
    return QuantisedWeight(codes, scales, 2 * codes.shape[1], scheme.group_size, 4, float4=True)


def _gguf(scheme: TensorScheme, read: Reader) -> QuantisedWeight:
    return weight_of_blocks(scheme.kind, _needed(read, "weight"))


def _grouped(
    scheme: TensorScheme, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None
) -> QuantisedWeight:
    """``codes`` uint8 [out, in]; ``groups``: of each input, where their order may not be the inputs'."""
    columns, order = codes.shape[1], None
    group = scheme.group_size or columns
    if groups is not None and (groups != torch.arange(columns, device=groups.device) // group).any():
        order = groups.long().argsort(stable=True)
        codes = codes[:, order]
    if zeros is not None and bool((zeros == 2.0 ** (scheme.bits - 1)).all()):
        zeros = None
    if scheme.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return QuantisedWeight(
        codes.contiguous(), scales.contiguous(), columns, group, scheme.bits,
        None if zeros is None else zeros.contiguous(), order,
    )  # fmt: skip


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, numbers], the lowest bits first."""
    as_bytes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return as_bytes
    assert WORD_BITS == 4 * 8
    return torch.stack((as_bytes & 15, as_bytes >> 4), -1).flatten(1)


def _in_order(columns: Tensor) -> Tensor:
    """AWQ's columns as they are numbered."""
    words = columns.view(len(columns), -1, len(AWQ_ORDER))
    ordered = torch.empty_like(words)
    ordered[..., list(AWQ_ORDER)] = words
    return ordered.flatten(1)


def _needed(read: Reader, name: str) -> Tensor:
    tensor = read(name)
    assert tensor is not None, name  # the folder's check has found it
    return tensor
