"""What is installed only where it is needed: which extra of the package brings which module."""

from __future__ import annotations

import importlib.util

EXTRAS = {
    "worker": ("torch", "xxhash", "cryptography", "psutil", "pynvml"),
    "bench": ("aiohttp",),
    "cli": ("prompt_toolkit",),
    "plan": ("matplotlib",),
    "ray": ("ray",),
    "gguf": ("gguf",),
    "object-store": ("obstore",),
}


def missing_for(extra: str) -> str:
    """What to install before ``extra`` can be used; "" where all of it is here."""
    absent = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    return _sentence(absent[0], extra) if absent else ""


def advice_for(error: ModuleNotFoundError) -> str:
    """What to install; "" where no extra has that module."""
    module = (error.name or "").partition(".")[0]
    return next((_sentence(module, extra) for extra, modules in EXTRAS.items() if module in modules), "")


def _sentence(module: str, extra: str) -> str:
    return f"this needs {module}, which is not installed: pip install 'splitserve[{extra}]'"
