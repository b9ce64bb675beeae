"""The heap of small objects lies in huge pages once that was asked for, where the kernel can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.transport.process.heap import collapse_heap

COUNT = """
import re
from pathlib import Path
from splitserve.transport.process.heap import collapse_heap
kept = [[i] for i in range(1_000_000)]
def huge():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages: +(\\d+) kB", rollup)[1]) // 1024
before = huge()
asked = collapse_heap() >> 20
print(before, asked, huge(), sum(one[0] for one in kept))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this kernel does not tell")
def test_what_is_on_the_heap_comes_to_lie_in_huge_pages_and_stays_what_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=200, check=True
    )
    before, asked, after, total = map(int, done.stdout.split())
    assert total == 1_000_000 * 999_999 // 2
    assert asked >= 8
    if after == before:
        pytest.skip("this kernel cannot, or has no memory in one piece")
    assert after - before >= 8


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert collapse_heap() == 0
