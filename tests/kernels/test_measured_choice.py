"""Kernels are chosen by measurement, once; what is remembered is believed only if it is whole and this
machine's."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from splitserve.kernels import measured_choice
from splitserve.kernels.measured_choice import NEVER, ROWS, KernelChoices

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
native_linear = pytest.importorskip("splitserve.kernels.native_linear")


def unwanted() -> int:
    raise AssertionError("measured again")


def test_a_choice_is_measured_once_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "kernels.json"
    choices = KernelChoices(path, "this")
    assert choices.get("a", lambda: 3) == 3
    assert KernelChoices(path, "this").get("b", lambda: 4) == 4
    assert choices.get("a", unwanted) == 3
    later = KernelChoices(path, "this")
    assert (later.get("a", unwanted), later.get("b", unwanted)) == (3, 4)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "7",
        '"text"',
        json.dumps({"machine": "this"}),
        json.dumps({"machine": "this", "choices": [1]}),
        json.dumps({"machine": "this", "choices": {"a": "many"}}),
        json.dumps({"machine": "other", "choices": {"a": 1}}),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(content)
    assert KernelChoices(path, "this").get("a", lambda: 5) == 5
    assert KernelChoices(path, "this").get("a", unwanted) == 5


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choices = KernelChoices(tmp_path / "file" / "kernels.json", "this")
    assert choices.get("a", lambda: 5) == 5
    assert choices.get("a", unwanted) == 5


def test_two_that_start_together_agree(tmp_path: Path) -> None:
    """Or two exact workers of one host might not serve together."""
    path = tmp_path / "kernels.json"
    measuring, release = threading.Event(), threading.Event()

    def measure() -> int:
        measuring.set()
        assert release.wait(60)
        return 1

    found: list[int] = []
    first = threading.Thread(target=lambda: found.append(KernelChoices(path, "this").get("a", measure)))
    first.start()
    assert measuring.wait(60)
    other = KernelChoices(path, "this")  # has read: there is no file yet
    second = threading.Thread(target=lambda: found.append(other.get("a", unwanted)))
    second.start()
    release.set()
    first.join(60)
    second.join(60)
    assert found == [1, 1]


@pytest.mark.parametrize(
    ("faster", "limit"),
    [((), NEVER), ((128,), 128), ((32, 128), 32), (ROWS, 0), ((1, 8), NEVER), ((1, 128), 128)],
)
def test_onednn_is_taken_from_where_on_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, faster: tuple[int, ...], limit: int
) -> None:
    asked: list[int] = []

    def seconds(candidates: list[object]) -> list[float]:
        for run in candidates:
            run()  # type: ignore[operator]
        return [1.0, 0.5 if asked[-1] in faster else 0.95]

    monkeypatch.setattr(measured_choice, "fastest", seconds)
    assert measured_choice.rows_of_onednn(asked.append, asked.append) == limit


def test_this_machine_chooses_an_instruction_set_that_it_has() -> None:
    choices = KernelChoices(None, "")
    chosen = native_linear.measured_instruction_set(choices)
    assert chosen in native_cpu._cpu.instruction_sets()
    assert native_linear.measured_instruction_set(choices) == chosen


def test_prefetching_begins_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, asked = native_cpu._cpu.instruction_sets()[0], []
    monkeypatch.setattr(native_cpu._cpu, "ask_from_rows", asked.append)
    monkeypatch.setattr(native_linear, "STREAMED_COPIES", 1)
    for first_faster, rows in ((1, 1), (3, 4), (8, 8), (9, native_linear.ALWAYS_ASKING)):

        def seconds(candidates: list[partial[None]], first_faster: int = first_faster) -> list[float]:
            for run in candidates:
                run()
            return [0.9 if candidates[0].args[0] >= first_faster else 1.1, 1.0]

        monkeypatch.setattr(native_linear, "fastest", seconds)
        choices = KernelChoices(None, "")
        assert native_linear.measured_asking_rows(choices, chosen) == rows
        assert native_linear.measured_asking_rows(choices, chosen) == rows == asked[-1]


def test_prefetching_changes_no_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    for name in native_cpu._cpu.instruction_sets():
        kernels = native_cpu.NativeCpuKernels(1, name)
        linear = kernels.linear(torch.randn(70, 130, generator=generator).bfloat16(), None)
        x = torch.randn(13, 130, generator=generator).bfloat16()
        for rows in (1, 3, 6, 13):
            native_cpu._cpu.ask_from_rows(1)
            asking = linear(x[:rows])
            native_cpu._cpu.ask_from_rows(NEVER)
            assert torch.equal(linear(x[:rows]), asking)
    native_cpu._cpu.ask_from_rows(1)
    native_cpu._cpu.use_instruction_set(
        native_linear.measured_instruction_set(KernelChoices.of_this_machine())
    )


def test_one_thread_measures_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads were measured while another process had one of their cores, and slow products chosen for
    good."""
    pools, threads = [], []

    def rows_of_onednn(own: object, onednn: object) -> int:
        threads.append(torch.get_num_threads())
        return 8

    monkeypatch.setattr(native_cpu._cpu, "use_thread_pool", pools.append)
    monkeypatch.setattr(native_cpu, "rows_of_onednn", rows_of_onednn)
    kernels = native_cpu.NativeCpuKernels(1, native_cpu._cpu.instruction_sets()[0], KernelChoices(None, ""))
    kernels.linear(torch.ones(32, 32, dtype=torch.bfloat16), None)
    assert pools == [0, native_linear.OF_ONE_THREAD, 0]
    assert threads == [1]


@pytest.mark.parametrize(("rows", "packed"), [(NEVER, 4), (8, 4), (0, 0)])
def test_layers_are_fused_for_as_many_rows_as_all_linears_are_ours(rows: int, packed: int) -> None:
    weight = torch.ones(32, 32, dtype=torch.bfloat16)
    choices = KernelChoices(None, "")
    choices.made["32x32"] = rows
    kernels = native_cpu.NativeCpuKernels(1, native_cpu._cpu.instruction_sets()[0], choices)
    norm = torch.ones(32, dtype=torch.bfloat16)
    linears = [kernels.linear(weight, None) for _ in range(4)]
    qkv, o, gate_up, down = linears
    mlp = native_cpu.DenseMlp(gate_up, "silu", down, 16)
    layer = native_cpu.LayerParts(norm, qkv, None, None, False, norm, o, None, norm, mlp, None, None)
    fused = kernels.fuse_layers([layer], 1e-5)
    assert (fused is not None) == bool(packed)
    if fused is not None:
        assert fused.rows == rows
