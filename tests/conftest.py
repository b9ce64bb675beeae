"""Triton's kernels run in its interpreter here (it reads this when it is imported); ``bench/gpu_check.py`` runs them on a GPU."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
