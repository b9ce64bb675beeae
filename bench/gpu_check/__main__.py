"""Checks and measures everything that runs on a GPU, within ten minutes on one card.

    python -m splitserve.bench.gpu_check --out OUT             # where splitserve[worker,bench] is installed
    python -m splitserve.bench.gpu_check --out OUT --rehearse  # every part in small sizes, without a GPU
    deploy/gpu_check_bundle.sh gpu_check.tar     # for a machine without a network: this tree and its wheels
    tar xf gpu_check.tar && gpu_check/run.sh OUT               # there

On a machine that is lent for fifteen minutes, ten a command, its own start among them: first what is in
doubt, then the rest, with time to mend between:

    gpu_check/run.sh OUT --seconds 280
    gpu_check/run.sh OUT --begin "serve fp8" --seconds 350

It needs torch for CUDA and Triton. It uses transformers, compute-sanitizer and FlashAttention-3 (as
flash_attn_interface, or in vLLM) where they are installed. The bundle brings the wheels of all else that
splitserve[worker,bench] needs; run.sh installs those that are missing, into the bundle's own folder.

Each part has a process and a time limit of its own: one that crashes or hangs costs itself alone. OUT
receives, replaced after every part and every few seconds:

    summary.txt    one page: what is wrong, what was not run, each figure beside its goal
    results.json   every line of every part, and the end of the log of each that failed
    logs.tar.gz    the logs of all parts

It ends with 1 if anything is wrong; a missed goal is not wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from itertools import dropwhile
from pathlib import Path

from ..environment import environment
from .plan import SECONDS, SPARE, STAGES, table
from .running import Run

REHEARSAL_SECONDS = 6 * SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m splitserve.bench.gpu_check",
        description=f"{__doc__}\nThe plan:\n\n{table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"for all parts (default: {SECONDS}; {REHEARSAL_SECONDS} in a rehearsal); fewer: less is begun",
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="names of the parts to run")
    parser.add_argument(
        "--begin", metavar="PART", help="run the first stage, then this part's and those behind it"
    )
    parser.add_argument("--rehearse", action="store_true", help="in small sizes on the CPU; measures nothing")
    options = parser.parse_args()
    stages = (*STAGES, *SPARE)
    names = {part.name for stage in stages for part in stage}
    if unknown := {*(options.only or ()), *filter(None, [options.begin])} - names:
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    if options.begin:
        later = dropwhile(lambda stage: options.begin not in {part.name for part in stage}, stages)
        stages = (stages[0], *(stage for stage in later if stage is not stages[0]))
    if options.only:
        chosen = (tuple(part for part in stage if part.name in options.only) for stage in stages)
        stages = tuple(filter(None, chosen))
    if not options.rehearse and not _has_gpu():
        parser.error("torch finds no GPU here: use --rehearse, or see why torch.cuda.is_available() is false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the parts end, too
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        variables = {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", f"{folder}/triton")}
        run = Run(
            stages,
            options.out,
            Path(folder),
            "cpu" if options.rehearse else "cuda",
            options.seconds or (REHEARSAL_SECONDS if options.rehearse else SECONDS),
            _environment(options.rehearse),
            variables | ({"TRITON_INTERPRET": "1"} if options.rehearse else {}),
        )
        good = run.run()
    print(f"\n{(options.out / 'summary.txt').read_text()}", flush=True)
    return 0 if good else 1


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _environment(rehearse: bool) -> dict[str, object]:
    import torch
    import triton

    found = environment() | {"torch": torch.__version__, "triton": triton.__version__}
    return found | ({"gpu": "none (rehearsal)"} if rehearse else {})


if __name__ == "__main__":
    sys.exit(main())
