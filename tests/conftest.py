"""Triton's kernels run in its interpreter here (it reads this when it is imported); ``bench/gpu_check.py`` runs them on a GPU."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile("suite", deadline=None)  # how long an example takes says how busy the machine is; each test has its time limit
settings.load_profile("suite")
