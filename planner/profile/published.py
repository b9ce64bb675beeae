"""Profiles from published performance data: splitwise-sim's measurements, DistServe's fitted coefficients.

What the data lack (the KV cache's size, the link) comes from the model's shape and the publication. Power
stays unknown: splitwise-sim's columns are shares of an unnamed limit, without an idle GPU's, and zero for the
H100.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...engine.latency_profile import HandoffModel, Memory, Piece, Profile, StepModel
from ..errors import ProfilingError
from .fit import StepPoint, fit_steps

GIB = 1 << 30
BLOCK_SIZE = 64  # tokens
GPU_BYTES = 80 * GIB
"""Memory of each GPU that splitwise-sim measured. The KV cache gets all that the weights leave, as there."""
SPLITWISE_HANDOFF = HandoffModel(put_s=0.0, bytes_per_s=200 * GIB, message_s=0.0, check_bytes_per_s=1e15)
"""Its ``mixed_pool.yml``: 200 GiB/s for each request."""


@dataclass(frozen=True, slots=True)
class _Shape:
    num_layers: int
    kv_width: int  # elements of K (and of V) of one token in one layer
    weight_bytes: float
    max_model_len: int

    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.kv_width * 2


SHAPES = {
    "llama2-70b": _Shape(80, 8 * 128, 135e9, 16384),
    "bloom-176b": _Shape(70, 14336, 329e9, 16384),
    "facebook/opt-13b": _Shape(40, 5120, 26e9, 2048),
    "facebook/opt-66b": _Shape(64, 9216, 132e9, 2048),
    "facebook/opt-175b": _Shape(96, 12288, 350e9, 2048),
}


def import_published(path: Path, model: str, hardware: str, tensor_parallel: int) -> Profile:
    """Import a profile from any known format; the file's beginning decides. Raises ProfilingError."""
    text = _text(path)
    if text.lstrip().startswith("{"):
        return _distserve(path, json.loads(text), model, tensor_parallel)
    rows = list(csv.DictReader(text.splitlines()))
    if rows and {"prompt_size", "prompt_time", "token_time"} <= rows[0].keys():
        return splitwise(path, rows, model, hardware, tensor_parallel)
    raise ProfilingError(
        f"{path} is neither splitwise-sim's perf_model.csv nor a DistServe profile in JSON; steps and "
        "benchmarks of servers need --like PROFILE, such as --like llama-3.1-70b-fp8@8xh100"
    )


def splitwise(
    path: Path, rows: list[dict[str, str]], model: str, hardware: str, tensor_parallel: int
) -> Profile:
    """splitwise-sim's measurements as they are meant: decode time by sequences and by the tokens in their
    caches."""
    cells = _splitwise_cells(path, rows, model, hardware, tensor_parallel)
    shape = _shape(model)
    prefill, decode = [], []
    for (prompt, batch, output), (prompt_s, token_s) in cells.items():
        prefill.append(StepPoint(prompt * batch, batch * prompt * (prompt + 1) / 2, batch, prompt_s))
        decode.append(StepPoint(batch, batch * (prompt + output / 2), batch, token_s))
    left_bytes = tensor_parallel * GPU_BYTES - shape.weight_bytes
    blocks = int(left_bytes // (shape.token_bytes() * BLOCK_SIZE))
    return Profile(
        name=f"{model} {hardware} tp{tensor_parallel}",
        hardware=hardware,
        gpus=tensor_parallel,
        source="splitwise-sim's measurements (github.com/Mutinifni/splitwise-sim, MIT), median of each cell",
        memory=_memory(shape, blocks),
        prefill=fit_steps(prefill, sorted({p.units for p in prefill}), ("read_s",)),
        decode=fit_steps(decode, sorted({p.units for p in decode}), ("read_s",)),
        handoff=SPLITWISE_HANDOFF,
    )


def _distserve(path: Path, content: dict[str, Any], model: str, tensor_parallel: int) -> Profile:
    """Milliseconds: prefill a + b sum(l) + c sum(l^2); decode a + b sum(context) + c batch, in two regimes of
    the batch."""
    try:
        fitted = content[model][str(tensor_parallel)]
    except KeyError:
        raise ProfilingError(
            f"{path} has no {model} with tensor parallelism {tensor_parallel}; it has {', '.join(content)}"
        ) from None
    a, b, c = (x / 1e3 for x in fitted["prefill"])
    threshold = fitted["decoding_large_small_bs_threshold"]
    shape = _shape(model)
    num_tokens = _max_num_tokens(path.parent / "max_num_tokens.csv", model, tensor_parallel)
    return Profile(
        name=f"{model} a100-80gb tp{tensor_parallel}",
        hardware="a100-80gb",
        gpus=tensor_parallel,
        source="DistServe's fitted coefficients (github.com/LLMServe/DistServe, Apache-2.0)",
        memory=_memory(shape, num_tokens // 16, 16),
        prefill=StepModel(pieces=(Piece(curve=_line(a, b - c), read_s=2 * c),)),  # l * l = 2 pairs - l
        decode=StepModel(
            pieces=(
                _decode_piece(fitted["decoding_smallbs"], threshold),
                _decode_piece(fitted["decoding_largebs"], None),
            )
        ),
        handoff=HandoffModel(put_s=0.0, bytes_per_s=1e15, message_s=0.0, check_bytes_per_s=1e15),
    )


def _decode_piece(coefficients: list[float], below: float | None) -> Piece:
    a, context, batch = (x / 1e3 for x in coefficients)
    return Piece(below=below, curve=_line(a, batch), read_s=context)


def _line(at_zero: float, slope: float) -> tuple[tuple[float, float], ...]:
    return ((0.0, at_zero), (1024.0, at_zero + 1024 * slope))


def _max_num_tokens(path: Path, model: str, tensor_parallel: int) -> int:
    rows = csv.DictReader(_text(path).splitlines())
    found = [
        int(r["max_num_tokens"])
        for r in rows
        if (r["model"], r["tp"], r["pp"]) == (model, str(tensor_parallel), "1")
    ]
    if not found:
        raise ProfilingError(f"{path} has no row for {model}, tp {tensor_parallel}, pp 1")
    return found[0]


def _splitwise_cells(
    path: Path, rows: Iterable[dict[str, str]], model: str, hardware: str, tensor_parallel: int
) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(prompt, batch, output) -> seconds of the prompt and of a decode step."""
    cells: defaultdict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
    known = set()
    for row in rows:
        known.add(f"{row['model']} {row['hardware']} tp{row['tensor_parallel']}")
        if _is(row, model, hardware, tensor_parallel):
            cell = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
            cells[cell].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    if not cells:
        raise ProfilingError(
            f"{path} has no {model} {hardware} tp{tensor_parallel}; it has {', '.join(sorted(known))}"
        )
    return {
        cell: (median(p for p, _ in times), median(t for _, t in times))
        for cell, times in sorted(cells.items())
    }


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfilingError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _is(row: dict[str, str], model: str, hardware: str, tensor_parallel: int) -> bool:
    return (row["model"], row["hardware"], int(row["tensor_parallel"])) == (model, hardware, tensor_parallel)


def _shape(model: str) -> _Shape:
    if model not in SHAPES:
        raise ProfilingError(f"the shape of {model} is not known here; known are {', '.join(SHAPES)}")
    return SHAPES[model]


def _memory(shape: _Shape, num_blocks: int, block_size: int = BLOCK_SIZE) -> Memory:
    return Memory(
        block_size=block_size,
        num_blocks=num_blocks,
        block_bytes=shape.token_bytes() * block_size,
        num_layers=shape.num_layers,
        max_model_len=shape.max_model_len,
    )
