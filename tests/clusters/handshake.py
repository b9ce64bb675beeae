"""What it costs that a prefill and a decode worker meet: Connect, Meet, the mover opened and tested.

    PYTHONPATH=tests python tests/clusters/handshake.py bench/results/handshake.json

Real worker loops and sockets of one process, a model that takes no time: the first handoff of a pair beside
its second one. Seconds; not a part of the tests.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from support.worker_pair import WorkerPair, spec

from splitserve.bench.environment import environment
from splitserve.transport.messages.messages import Joined

NUM_PAIRS = 20


def handoff_ms(pair: WorkerPair, number: int) -> float:
    """Return the milliseconds from a prompt's dispatch until its sequence has joined the decode batch."""
    began = time.perf_counter()
    pair.ask(spec(number))
    pair.until(lambda: sum(isinstance(m, Joined) for m in pair.received) == number + 1)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    found: dict[str, object] = {}
    for mover in ("tcp", "shm"):
        first, second = [], []
        for _ in range(NUM_PAIRS):
            with WorkerPair(mover) as pair:
                first.append(handoff_ms(pair, 0))
                second.append(handoff_ms(pair, 1))
        medians = {"first": statistics.median(first), "second": statistics.median(second)}
        found[f"{mover}, ms, medians of {NUM_PAIRS} pairs"] = {k: round(v, 2) for k, v in medians.items()}
    result = {"environment": environment(), **found}
    print(json.dumps(found, indent=2))
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
