"""One step of both beside two: decode rows and a chunk of a prompt, in one batch and one after the other.

    python -m splitserve.bench.kernels.mixed_step [--model 125m] [--dtype bfloat16] [--rows 8] [--rounds 9]

Milliseconds of processor time of one thread, the median of the rounds; the two ways alternate.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from ...engine.step.batch import Batch
from ...engine.step.model_runner import ModelRunner
from ..environment import option_parser
from .engine import make_batch, make_runner

CONTEXT, CHUNKS = 256, (16, 64, 128)  # tokens


def milliseconds(runner: ModelRunner, *batches: Batch) -> float:
    """Processor time of these steps."""
    began = time.thread_time()
    for batch in batches:
        runner.execute(batch)
    return 1e3 * (time.thread_time() - began)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="125m", help="of bench/models.py (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=8, help="sequences that generate")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(Path(folder), options.model, options.dtype, exact=False, num_blocks=1024)
        rows = make_batch(options.rows, CONTEXT, 1)
        for count in CHUNKS:
            chunk = make_batch(1, CONTEXT, count)
            both = rows.followed_by(chunk)
            taken = [
                (milliseconds(runner, rows, chunk), milliseconds(runner, both)) for _ in range(options.rounds)
            ]
            apart, together = (statistics.median(times) for times in zip(*taken, strict=True))
            print(
                f"{options.rows} rows and {count} prompt tokens: {apart:.1f} ms in two steps, "
                f"{together:.1f} in one ({together / apart:.2f} times)"
            )


if __name__ == "__main__":
    main()
