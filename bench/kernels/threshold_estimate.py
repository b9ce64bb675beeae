"""Estimates the time of the top-k/top-p kernel on an H100, without one: an estimate, nothing is measured.

python -m splitserve.bench.kernels.threshold_estimate

The kernel is compiled for sm_90 and disassembled. Of each loop over scores the instructions for a score are
counted; a warp's instruction takes a clock of one of an SM's four schedulers. A pass over the rows takes as
long as its instructions or, if that is longer, as reading the rows at the memory's rate. A round over the
scores that were copied out costs its sums and barriers besides. With one program an SM, up to 132 rows take
the same time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import torch

from ...kernels.gpu.sampling_threshold import LANES, thresholds
from . import sm90

CLOCKS_PER_US = 1755.0
BYTES_PER_US = 3.0e6  # HBM3 of an H100; all rows of a batch of 132 do not fit into the second-level cache
SM_BYTES_PER_US = 6.0e4  # what one SM reads: 16 KiB on their way, for 0.25 us from the second-level cache
WARPS = LANES // 32 / 4  # of a scheduler
ROUND_CLOCKS = 3000.0  # sums over lanes, pivots and barriers: 600 instructions a warp, and their latencies
NAMES = ("maximum", "round", "copy", "kept round")
CASES = {  # rounds over the row, rounds over the scores that were copied out, how many these are
    "peaked row, top-p, bfloat16 logits": (1, 2, 512),
    "peaked row, top-k and top-p, bfloat16 logits": (1, 4, 512),
    "peaked row, top-k and top-p, float32 logits": (1, 15, 512),
    "normal logits of deviation 3, top-p 0.9": (1, 3, 15143),
    "flat row (temperature 100), top-p 0.9": (2, 2, 15377),
}


def instructions_per_score(vocab_size: int) -> dict[str, float]:
    """Count the instructions of the kernel's four loops."""
    n = 132
    floats, ints = torch.empty(n), torch.empty(n, dtype=torch.int32)
    with sm90.compiling():
        thresholds(torch.empty(n, vocab_size), floats, ints, floats, floats)
    loops = sm90.innermost_loops(sm90.cubins["_threshold_kernel"])
    unrolled = [loop for loop in loops if _count(loop, r"\bLDG\b") >= 8]
    assert len(unrolled) == len(NAMES), "the kernel's loops are not those that this knows"
    return {name: len(loop) / _count(loop, r"\bLDG\b") for name, loop in zip(NAMES, unrolled, strict=True)}


def microseconds(
    per_score: dict[str, float], vocab_size: int, rounds: int, kept_rounds: int, num_kept: int, rows: int
) -> float:
    reading = max(4 * vocab_size * rows / BYTES_PER_US, 4 * vocab_size / SM_BYTES_PER_US)

    def issue(name: str, scores: int) -> float:
        return per_score[name] * -(-scores // LANES) * WARPS / CLOCKS_PER_US

    passes = ["maximum", *["round"] * rounds, "copy"]
    kept = issue("kept round", num_kept) + ROUND_CLOCKS / CLOCKS_PER_US
    return sum(max(reading, issue(name, vocab_size)) for name in passes) + kept_rounds * kept


def _count(loop: Sequence[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, instruction)) for instruction in loop)


if __name__ == "__main__":
    for vocab_size in (128256, 151936):
        per_score = instructions_per_score(vocab_size)
        for case, counts in CASES.items():
            estimates = {
                f"{rows} rows": round(microseconds(per_score, vocab_size, *counts, rows)) for rows in (1, 132)
            }
            line = {"vocab_size": vocab_size, "case": case, "estimated_us": estimates}
            print(json.dumps(line | {"instructions_per_score": per_score}), flush=True)
