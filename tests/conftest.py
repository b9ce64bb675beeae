"""Triton's kernels run in its interpreter here (it reads this when it is imported); ``bench/gpu_check.py`` runs them on a GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile("suite", deadline=None)  # how long an example takes says how busy the machine is; each test has its time limit
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own hook reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """How two test processes share the work (``deploy/test.sh``): the tests of real processes, which need both cores, come first and in
    turn, the others file by file beside them."""
    for item in items:
        group = "e2e" if "e2e" in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: "e2e" not in item.path.parts)
