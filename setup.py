"""Only what pyproject.toml cannot say: the optional native CPU kernels.

The build is portable: each instruction set has its own source file, chosen when the module is imported. Where there is no compiler the
package installs without it and the kernels run in plain torch.
"""

from __future__ import annotations

from setuptools import Extension, setup

FOLDER = "src/splitserve/kernels/cpu"
HEADERS = ("kernels.h", "calls.h", "decoder.h", "thread_pool.h", "simd.h", "linear.h", "attention.h", "elementwise.h")
SOURCES = ("module.cpp", "isa_generic.cpp", "isa_avx2.cpp", "isa_avx512.cpp")

setup(
    ext_modules=[
        Extension(
            "splitserve.kernels._cpu",
            sources=[f"{FOLDER}/{name}" for name in SOURCES],
            depends=[f"{FOLDER}/{name}" for name in HEADERS],
            language="c++",
            # errno and traps of floating-point functions are never looked at; nothing else of -ffast-math is asked for
            extra_compile_args=["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
