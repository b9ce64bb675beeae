"""Whether an expert's columns divide is known before any weight is read, as if one had been cut."""

from __future__ import annotations

import pytest
import torch

from splitserve.engine.model.expert_split import _divides
from splitserve.engine.model.gguf_blocks import weight_of_blocks
from splitserve.engine.model.gguf_types import BLOCKS
from splitserve.engine.model.quantisation import TensorScheme
from splitserve.kernels.quantised import QuantisedWeight

SCHEMES = [
    TensorScheme("plain", 8, whole=True),
    TensorScheme("plain", 8, block=(128, 128), float8=True),
    TensorScheme("packed", 4, 32),
    TensorScheme("gptq", 8, 16),
    TensorScheme("packed", 4),
    TensorScheme("mxfp4", 4, 32),
    *(TensorScheme("gguf", 8, kind=kind) for kind in BLOCKS),
]


def weight_of(scheme: TensorScheme, columns: int) -> QuantisedWeight:
    """One row of zeros."""
    if scheme.kind:
        numbers, num_bytes = BLOCKS[scheme.kind]
        return weight_of_blocks(scheme.kind, torch.zeros(1, columns // numbers * num_bytes).byte())
    group = scheme.block[1] if scheme.block else scheme.group_size or columns
    codes = torch.zeros(1, columns * scheme.bits // 8, dtype=torch.uint8)
    return QuantisedWeight(
        codes, torch.ones(1, -(-columns // group)), columns, min(group, columns), scheme.bits
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.form} {scheme.bits} {scheme.kind}")
def test_what_divides(scheme: TensorScheme) -> None:
    found = set()
    for columns in (64, 128, 256, 768, 1024, 1536, 2880, 6144):
        if scheme.kind and columns % BLOCKS[scheme.kind][0]:
            continue
        weight = weight_of(scheme, columns)
        for size in (2, 3, 4, 8, 64):
            if columns % size:
                continue
            part = columns // size
            try:
                for first in range(0, columns, part):
                    weight.columns(first, first + part)
                cut = True
            except ValueError:
                cut = False
            assert _divides(scheme, columns, size) == cut, (columns, size)
            found.add(cut)
    assert found == {True, False} or scheme.whole
