"""Counts the instructions that the loops of the top-k/top-p kernels take for a score, as compiled for sm_90.

python -m splitserve.bench.kernels.threshold_loops
"""

from __future__ import annotations

import json

import torch

from ...kernels.gpu.sampling_threshold import LANES, thresholds
from . import sm90

SCORES = {  # of a thread in one turn of the loop
    "_survey_kernel": 2 * LANES // 128,
    "_sums_kernel": LANES // 128,
    "_copy_kernel": 4 * LANES // 128,
    "_narrow_kernel": 4,
}


def instructions_per_score(vocab_size: int) -> dict[str, float]:
    floats, ints = torch.empty(8), torch.empty(8, dtype=torch.int32)
    with sm90.compiling():
        thresholds(torch.empty(8, vocab_size), floats, ints, floats, floats)
    loops = {name: sm90.innermost_loops(sm90.cubins[name]) for name in SCORES}
    return {name: max(len(loop) for loop in loops[name] if _loads(loop)) / SCORES[name] for name in SCORES}


def _loads(loop: list[str]) -> bool:
    return any("LDG" in instruction for instruction in loop)


if __name__ == "__main__":
    for vocab_size in (128256, 151936):
        line = {"vocab_size": vocab_size, "instructions_per_score": instructions_per_score(vocab_size)}
        print(json.dumps(line), flush=True)
