"""What pyproject.toml cannot say: the optional native CPU kernels, and the commit that a wheel is built from.

The build is portable: each instruction set has its own source file, chosen when the module is imported. Where
there is no compiler the package installs without it and the kernels run in plain torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

FOLDER = "src/splitserve/kernels/cpu"
SOURCES = (
    "module.cpp",
    "isa_generic.cpp",
    "isa_avx2.cpp",
    "isa_avx512.cpp",
    "isa_avx512_vnni.cpp",
    "isa_avx512_bf16.cpp",
    "isa_amx.cpp",
)
OPTIONS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
"""errno and traps of floating-point functions are never read; nothing else of -ffast-math is used. Debugging
symbols, Python's default, would take a quarter of the time and seven eighths of the module."""
SOURCES_HASH = hashlib.sha256(
    b"".join(file.read_bytes() for file in sorted(Path(FOLDER).glob("*.*")))
).hexdigest()
"""kernels/native_linear.py refuses a module that was built from other sources than those beside it."""
COMMIT_FILE = "src/splitserve/cli/commit.txt"
"""In a wheel and in an sdist, not in a clone: `splitserve version` reads it."""


def commit() -> str:
    """The commit of this clone, with -dirty where files differ from it, or that of the sdist, or ""."""
    if Path(COMMIT_FILE).is_file():
        return Path(COMMIT_FILE).read_text()
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return (
            subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            if Path(".git").exists()
            else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


class BuildOnAllCores(build_ext):
    """Compiles the sources of an extension side by side."""

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], *rest: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as cores:
                return [*chain(*cores.map(lambda source: compile_all([source], *rest, **options), sources))]

        self.compiler.compile = compile_each
        super().build_extensions()


class BuildWithCommit(build_py):
    """Adds the commit to a wheel, but not to an editable install, which follows its clone."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            (Path(self.build_lib) / "splitserve" / "cli" / "commit.txt").write_text(commit())


class SdistWithCommit(sdist):
    """Adds the commit to an sdist."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / COMMIT_FILE).write_text(commit())


setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": BuildOnAllCores, "build_py": BuildWithCommit, "sdist": SdistWithCommit},
    ext_modules=[
        Extension(
            "splitserve.kernels._cpu",
            sources=[f"{FOLDER}/{name}" for name in SOURCES],
            depends=sorted(str(header) for header in Path(FOLDER).glob("*.h")),
            language="c++",
            extra_compile_args=OPTIONS,
            extra_link_args=["-pthread"],
            define_macros=[
                ("Py_LIMITED_API", "0x030B0000"),  # one wheel for every Python from 3.11 on
                ("SOURCES_HASH", f'"{SOURCES_HASH}"'),
            ],
            py_limited_api=True,
            optional=True,
        )
    ],
)
