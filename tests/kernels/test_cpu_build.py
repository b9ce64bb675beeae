from __future__ import annotations

import subprocess
import sys


def test_a_module_that_was_built_from_other_sources_is_not_used() -> None:
    code = "from splitserve.kernels import _cpu; _cpu.SOURCES_HASH = ''; import splitserve.kernels.native_cpu"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "built from other sources: python setup.py build_ext --inplace" in run.stderr
