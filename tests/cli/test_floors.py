"""No version with a known hole in what is used of it can be installed; and what the tests run with can."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
]

HOLES = [
    (
        "jinja2",
        "3.1.4",
        "CVE-2024-56326: a template leaves the sandbox, the only wall around a model's template",
    ),
    ("jinja2", "3.1.5", "CVE-2025-27516: the same by the filter attr"),
    (
        "starlette",
        "0.47.1",
        "CVE-2025-54121: a large multipart file, as /v1/files takes, stops the event loop",
    ),
    ("starlette", "0.49.0", "CVE-2025-62727: a Range header takes quadratic time where files are served"),
    ("starlette", "1.0.0", "CVE-2026-48710: a Host header changes request.url.path"),
    ("python-multipart", "0.0.17", "CVE-2024-53981: bytes around the boundaries, one at a time"),
    ("python-multipart", "0.0.25", "CVE-2026-40347: a large preamble or epilogue"),
    ("python-multipart", "0.0.29", "CVE-2026-53539: quadratic time for semicolons"),
    ("orjson", "3.11.4", "CVE-2025-67221: deep nesting overflows the stack of dumps"),
    (
        "cryptography",
        "46.0.6",
        "CVE-2026-39892: buffers that are not contiguous, as views of KV pools may be",
    ),
    ("aiohttp", "3.13.2", "CVE-2025-69223: a compressed body of any size"),
    ("aiohttp", "3.13.3", "CVE-2026-22815: trailers without a limit"),
    (
        "torch",
        "2.5.1",
        "CVE-2025-32434: torch.load runs code (it is not called; weights are safetensors only)",
    ),
    ("redis", "4.5.3", "CVE-2023-28859: an answer goes to another request after a cancellation"),
    ("pillow", "12.3.0", "CVE-2026-96643: an Exif header is replaced without end"),
    ("pillow", "12.3.0", "CVE-2026-112403: a JPEG image overflows the decoder's buffer"),
    ("pyyaml", "5.3.1", "CVE-2020-14343: full_load runs code (only safe_load is called)"),
]


@pytest.mark.parametrize(
    ("package", "version", "hole"), HOLES, ids=[f"{package}-{version}" for package, version, _ in HOLES]
)
def test_a_version_with_a_known_hole_is_excluded(package: str, version: str, hole: str) -> None:
    wanted = [requirement for requirement in WANTED if requirement.name.lower() == package]
    assert wanted
    assert not any(requirement.specifier.contains(version) for requirement in wanted), hole


def test_the_versions_that_the_tests_run_with_are_allowed() -> None:
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==\S+", line))
    for requirement in WANTED:
        if (version := pinned.get(requirement.name.lower())) is not None:
            assert requirement.specifier.contains(version), requirement
