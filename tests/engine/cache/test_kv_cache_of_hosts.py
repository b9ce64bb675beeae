"""What a host and its other workers leave for a KV cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.engines import engine_config
from support.models import make_checkpoint

from splitserve.engine import device as engine_device
from splitserve.engine import loaded_model
from splitserve.engine.cache import kv_cache, memory_claims
from splitserve.engine.cache.memory_claims import Claim, MemoryClaims
from splitserve.engine.device import free_host_bytes
from splitserve.engine.errors import OutOfMemoryError
from splitserve.engine.step.model_runner import ModelRunner


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(engine_device, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(engine_device, "CGROUP_ROOT", tmp_path)
    return tmp_path


def limited(folder: Path, names: tuple[str, str], values: tuple[object, object], stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, values, strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(stat)


def test_a_containers_limit_counts(cgroup: Path) -> None:
    (cgroup / "cgroup").write_text("0::/pod/container\n")
    limited(cgroup / "pod/container", ("memory.max", "memory.current"), ("max", 50), "inactive_file 0\n")
    limited(
        cgroup / "pod",
        ("memory.max", "memory.current"),
        (10_000_000, 4_000_000),
        "anon 5\ninactive_file 1000000\n",
    )
    assert free_host_bytes() == 7_000_000
    (cgroup / "cgroup").write_text("4:memory:/box\n0::/\n")
    limited(
        cgroup / "memory/box",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        (9_000, 2_000),
        "total_inactive_file 500\n",
    )
    assert free_host_bytes() == 7_500


def test_without_limits_what_the_host_has_counts(cgroup: Path) -> None:
    assert free_host_bytes() > 1 << 20  # no file at all
    (cgroup / "cgroup").write_text("0::/\n4:memory:/box\n")
    limited(
        cgroup / "memory/box",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        (0x7FFFFFFFFFFFF000, 2_000),
        "",
    )
    assert free_host_bytes() > 1 << 20


OTHER = """
import sys
from pathlib import Path
from splitserve.engine.cache.memory_claims import MemoryClaims
claims = MemoryClaims("tcp://c:1", Path(sys.argv[1]))
with claims.turn():
    claims.claim(weights=100 << 20, kv_cache=1 << 30, committed=1 << 20)
print("claimed", flush=True)
sys.stdin.read(1)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OTHER, str(tmp_path / "claims")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def test_a_claim_counts_as_long_as_its_worker_lives(other: subprocess.Popen[str], tmp_path: Path) -> None:
    claims = MemoryClaims("tcp://c:1", tmp_path / "claims")
    with claims.turn() as others:
        assert others.siblings == (1 << 30,)
        assert (1000 << 20) < others.pending <= (1123 << 20)
    with MemoryClaims("tcp://another:1", tmp_path / "claims").turn() as others:
        assert others.siblings == ()
        assert others.pending > 1000 << 20
    other.kill()
    other.wait(30)
    with claims.turn() as others:
        assert (others.pending, others.siblings) == (0, ())
    assert not list((tmp_path / "claims").glob(f"{other.pid}-*"))


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for name in ("real", "link", "file"):
        claims = MemoryClaims("c", tmp_path / name)
        with claims.turn() as others:
            claims.claim(1)
            assert others.pending == 0
    assert not list((tmp_path / "real").iterdir())


def test_a_claim_that_is_nonsense_is_passed_over(tmp_path: Path) -> None:
    claims = MemoryClaims("c", tmp_path)
    (tmp_path / "1-x").write_text("{")
    (tmp_path / "2-y").write_text(json.dumps({**asdict(Claim(2, "c", 0, 0)), "more": 1}))
    with claims.turn() as others:
        assert others.siblings == ()


def test_what_others_have_claimed_and_not_touched_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers of 15 GiB each started on a host of 21, which then killed processes at random."""
    make_checkpoint(tmp_path, "llama2")
    for module in (loaded_model, kv_cache):
        monkeypatch.setattr(module, "available_bytes", lambda device: 12 << 20)
    monkeypatch.setattr(memory_claims, "default_folder", lambda: tmp_path / "claims")
    other = MemoryClaims("another cluster")
    other._claim = replace(other._claim, pid=1, before=1 << 50)
    asked = engine_config(tmp_path, "cpu", "float32", kv_cache_gib=8 / 1024, max_model_len=64)
    assert ModelRunner(asked).kv_cache.num_bytes <= 8 << 20
    other.claim(0, 6 << 20)
    with pytest.raises(OutOfMemoryError, match=r"other workers of this host have claimed all but 0\.01 GiB"):
        ModelRunner(asked)
