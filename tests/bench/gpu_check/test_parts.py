"""What will run on a GPU once has run before, in tiny shapes in the interpreter: every figure, the checks of
whole models, and a few of the kernels'."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.played_gpu import played_gpu

from splitserve.bench.gpu_check import correctness, host, machine, parity, serving, speed
from splitserve.bench.gpu_check.line import Place
from splitserve.bench.gpu_check.plan import SPARE, STAGES
from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.engine_figures import TINY, BareEngine, RandomTensors, run_again
from splitserve.bench.kernels.gpu_timing import Figure
from splitserve.bench.kernels.kernel_checks import Check, checks
from splitserve.bench.kernels.kernel_inputs import relative_error
from splitserve.bench.kernels.transformers_peer import PeerFailed, peer_us

triton_interpreter.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a GPU are not for the interpreter"),
]

QUICK = (
    "norm",
    "gate",
    "rope",
    "embedding",
    "blocks",
    "checksums",
    "decode attention, fp8",
    "attention, prefill 64 float16",
)
SPEED = [
    part for stage in (*STAGES, *SPARE) for part in stage if ".speed:" in part.run and "0.6B" not in part.name
]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("cpu", False, tmp_path)


@pytest.mark.parametrize("part", SPEED, ids=[part.name for part in SPEED])
def test_every_figure_can_be_made(part: Any, place: Place) -> None:
    lines = list(getattr(speed, part.run.partition(":")[2])(place, *part.arguments))
    assert lines
    assert all(line.left_out or line.value is not None for line in lines)
    names = " ".join(line.what for line in lines)
    for piece in {
        "engine 8B": ("decode step, batch 2", "the device's part", "prefill, 20 tokens"),
        "attention": ("float8 KV slope", "decode attention", "prefill attention"),
        "small kernels": ("top-p 0.9", "top-k 20 and top-p 0.95 costs", "checksums of"),
        "exact costs": ("exact costs more: tiny, exact: decode step",),
        "worker": ("from process start to ready", "beside transformers"),
    }.get(part.name, ()):
        assert piece in names


def test_flash_attention_3_is_timed_where_the_product_would_use_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "usable", lambda provider, device, shape, ours: (ours, provider.name))
    theirs, ours, ratio = speed.flash_attention_3(place)
    assert theirs.what.startswith(ours.what)
    assert ratio.what == "our prefill's time beside FlashAttention-3's, 20 tokens"


@pytest.mark.parametrize("factor", [1, 1.02])
def test_products_of_the_cpu_are_checked_and_timed(
    place: Place, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    native_cpu = pytest.importorskip("splitserve.kernels.native_cpu", exc_type=ImportError)
    names = [name for name in native_cpu._cpu.instruction_sets() if name.startswith("avx512")]
    multiply = native_cpu.PackedLinear.__call__
    monkeypatch.setattr(native_cpu.PackedLinear, "__call__", lambda self, x: multiply(self, x) * factor)
    monkeypatch.setattr(host, "_steps", lambda place: iter(()))  # a process: the rehearsal runs it
    about, *lines = host.cpu(place)
    assert "avx" in about.note
    values, times = lines[: 2 * len(names)], lines[2 * len(names) :]
    assert [line.good for line in values] == [factor == 1, True] * len(names)
    assert {line.what.split(", ")[2] for line in times} >= set(names)
    assert all(line.value for line in times)


def test_a_host_without_the_c_kernels_says_what_it_has(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "splitserve.kernels._cpu", None)
    monkeypatch.delattr("splitserve.kernels._cpu", raising=False)
    about, absent = host.cpu(place)
    assert "avx" in about.note
    assert absent.left_out


def test_a_peer_that_fails_costs_only_its_own_figure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours_then_theirs(*_: object) -> Any:
        yield Figure("ours", 1.0, 1.0, 1.0, "B")
        raise PeerFailed("AttributeError: no generate_batch")

    monkeypatch.setattr("splitserve.bench.kernels.gpu_worker.worker_figures", ours_then_theirs)
    ours, theirs = speed.worker(place)
    assert (ours.what, theirs.left_out, theirs.note) == ("ours", True, "AttributeError: no generate_batch")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_and_greedy_tokens_beside_transformers(place: Place, family: str) -> None:
    lines = list(parity.parity(place, family))
    assert [line.good for line in lines] == [True] * 3, lines


def test_other_weights_are_not_at_parity(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherWeights(BareEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "checkpoint": None})

    monkeypatch.setattr(parity, "BareEngine", OtherWeights)
    assert [line.good for line in parity._parity(place, "llama")] == [False] * 3


def test_graphs_beside_no_graphs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(correctness.graphs(place))
    assert [line.good for line in lines] == [True] * 5
    assert "graph of 4 with 3 sequences" in lines[-2].what

    def stale(compute: Any) -> Any:
        return run_again(lambda: compute().zero_())

    monkeypatch.setattr(correctness, "run_again", stale)
    assert not any(line.good for line in correctness.graphs(place))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_a_cpus_tokens_with_the_played_gpu(
    place: Place, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def greedy(device: str, record: Any) -> tuple[torch.Tensor, list[int]]:
        engine = BareEngine(
            {**TINY, "num_hidden_layers": 2},
            torch.device(device),
            False,
            256,
            (1, record),
            num_tokens=256,
            checkpoint=RandomTensors(torch.device("cpu")),
            dtype=dtype,
        )
        return parity.greedy(engine, list(range(3, 40)), 3)

    logits, tokens = greedy("cpu", run_again)
    with played_gpu(monkeypatch) as gpu:
        found, found_tokens = greedy("cuda", gpu.record)
    assert relative_error(found.as_subclass(torch.Tensor), logits) < 1e-5
    assert found_tokens == tokens


def test_a_token_from_a_wrong_cache_is_far_below_the_best() -> None:
    engine = BareEngine(TINY, torch.device("cpu"), False, 256, (1, run_again), num_tokens=256)
    prompt = [5, 9, 17, 3]
    _, served = parity.greedy(engine, prompt, 3)
    assert max(serving._gaps(engine, prompt, served)) <= serving.NEAR
    assert max(serving._gaps(engine, prompt, [(token + 1) % 60 for token in served])) > serving.NEAR


def sanitizer(folder: Path, summary: str, status: int) -> None:
    """A compute-sanitizer that runs the program after its options, and reports."""
    script = folder / "compute-sanitizer"
    script.write_text(f"#!/bin/sh\nshift 4\n\"$@\"\necho '========= {summary}'\nexit {status}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("summary", "status", "good"),
    [
        ("ERROR SUMMARY: 0 errors", 0, True),
        ("ERROR SUMMARY: 2 errors", 99, False),
        ("no summary", 1, False),
        ("RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 0, False),
    ],
)
def test_what_the_sanitizer_finds_is_wrong(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, summary: str, status: int, good: bool
) -> None:
    sanitizer(tmp_path, summary, status)
    (tmp_path / "lines").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(correctness.SANITIZED, "memcheck", ("embedding",))
    monkeypatch.setattr(correctness, "SMALL_CHECKS", "support.gpu_check_parts:fine")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    *checks, last = correctness.sanitized(place, "memcheck")
    assert [line.what for line in checks] == ["a figure", "a check"]
    assert last.good is good


def test_without_a_sanitizer_a_gpu_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness.shutil, "which", lambda *_, **__: None)
    (line,) = correctness.sanitized(Place("cuda", True, tmp_path), "memcheck")
    assert line.left_out


def test_a_lost_context_ends_the_part() -> None:
    def lost(device: str) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(device: str) -> float:
        raise ValueError("no such shape")

    after = Check("after", 0.0, lambda device: 0.0)
    first, second = correctness.results([Check("broken", 0.0, broken), after], "cpu")
    assert (first.good, second.good) == (False, True)
    with pytest.raises(RuntimeError, match="illegal memory"):
        list(correctness.results([Check("lost", 0.0, lost), after], "cpu"))


def test_ceilings_are_measured_once(place: Place) -> None:
    assert len(list(machine.machine(place))) == 3
    assert place.ceilings() == place.ceilings()


def test_kernels_are_compiled_in_other_processes(place: Place) -> None:
    missing, there = machine._compiled(["no such case", "silu_mul float16"])
    assert (missing.good, there.good) == (False, True), "one that fails costs the others nothing"
    assert missing.note == "KeyError: 'no such case'"
    assert "registers" in there.note


@pytest.mark.parametrize(
    "check",
    [check for check in checks(big=False) if check.name.startswith(QUICK)],
    ids=lambda check: check.name,
)
def test_a_check_passes(check: Check) -> None:
    assert check.run("cpu") <= check.allowed


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise ValueError('no such option')", "ValueError: no such option"), ("", "within 0 s")],
)
def test_a_peer_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, why: str
) -> None:
    ours = subprocess.run

    def other_program(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return ours([sys.executable, "-S", "-c", code or "import time; time.sleep(60)"], **options)

    monkeypatch.setattr("splitserve.bench.kernels.transformers_peer.subprocess.run", other_program)
    monkeypatch.setattr("splitserve.bench.kernels.transformers_peer.PATIENCE_S", 60.0 if code else 0.2)
    with pytest.raises(PeerFailed, match=why):
        peer_us(tmp_path, "cpu", 1, 1, 1)
