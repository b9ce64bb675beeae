"""Write the table of weight formats that the tests tried, by model family and device.

    python -m pytest tests/engine tests/kernels/test_gpu_latent.py \\
        -o junit_family=xunit1 --junit-xml tried.xml
    python tools/tried.py tried.xml > bench/results/tried.md

A test names its formats by the fixture ``tried``; a test that failed or was skipped is not in the table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

COLUMNS = {
    "wide": "CPU, float32 or bfloat16",
    "at load": "CPU, quantised at load",
    "checkpoint": "CPU, quantised checkpoints",
    "gguf": "CPU, GGUF",
    "gpu": "GPU kernels, in Triton's interpreter",
}


def tried_in(report: Path) -> dict[str, dict[str, list[str]]]:
    """Return by family and column the formats of tests that passed. ``report``: JUnit XML of pytest."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for case in ElementTree.parse(report).iter("testcase"):  # pytest's own
        if any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped")):
            continue
        for entry in case.iter("property"):
            if entry.get("name") == "tried":
                family, column, what = str(entry.get("value")).split("|")
                found[family][column].add(what)
    return {
        family: {column: sorted(of[column]) for column in COLUMNS} for family, of in sorted(found.items())
    }


def table(found: dict[str, dict[str, list[str]]]) -> str:
    rows = [["model", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    rows += [
        [family, *(", ".join(of[column]) or "not tried" for column in COLUMNS)]
        for family, of in found.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


HEADER = """# Weight formats that were tried, by model family and device

Written by `tools/tried.py` from a run of the tests. The models are small, seeded, random
(`tests/support/families.py`).
Each is held against transformers, with the same or with the dequantised weights.
"""


def main() -> None:
    print(HEADER)
    print(table(tried_in(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
