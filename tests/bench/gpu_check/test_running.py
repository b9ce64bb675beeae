"""A run of gpu_check loses nothing: whatever becomes of one part, the others report, and what is known is in
the results folder."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitserve.bench.gpu_check.__main__ import main
from splitserve.bench.gpu_check.line import Line, read_lines
from splitserve.bench.gpu_check.plan import SECONDS, SPARE, STAGES, Part, Stages, planned_seconds, table
from splitserve.bench.gpu_check.running import Run
from splitserve.bench.gpu_check.summary import Outcome, State, summary

TESTS = Path(__file__).parents[2]
PARTS = [part for stage in (*STAGES, *SPARE) for part in stage]
CRASHES = {
    "abort": "ended by SIGABRT",
    "fail": "ended with status 1",
    "hang": "did not end within 10 s and was killed",
}
HANG_LIMIT_S = 10.0  # within which its process must have started, on a machine with other work
STUB = "support.gpu_check_parts"
INSTALLATION_S = 50  # on the machine with the GPU, before the first part


def run(stages: Stages, folder: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """Run these stages. Return what results.json holds."""
    done = Run(
        stages, folder / "out", folder / "work", "cuda", seconds, {"gpu": "none"}, {"PYTHONPATH": str(TESTS)}
    )
    done.run()
    found: dict[str, Any] = json.loads((folder / "out" / "results.json").read_text())
    return found


def stubbed(way_of: Mapping[str, str]) -> Stages:
    """The plan, with parts that take no time; those in ``way_of`` crash in that way."""
    return tuple(
        tuple(
            replace(
                part,
                limit_s=60.0 if way_of.get(part.name) != "hang" else HANG_LIMIT_S,
                run=f"{STUB}:{way_of.get(part.name, 'fine')}",
            )
            for part in stage
        )
        for stage in (*STAGES, *SPARE)
    )


@pytest.mark.parametrize("crashed", [PARTS[::2], PARTS[1::2]], ids=["every other", "the others"])
def test_each_part_may_crash_and_the_others_still_report(crashed: list[Part], tmp_path: Path) -> None:
    way_of = {part.name: ("abort", "fail")[i % 2] for i, part in enumerate(crashed)}
    way_of[crashed[3].name] = way_of[crashed[4].name] = "hang"  # beside others, as all of its stage
    found = run(stubbed(way_of), tmp_path)
    text = (tmp_path / "out" / "summary.txt").read_text()
    for part in PARTS:
        report, way = found["parts"][part.name], way_of.get(part.name)
        if way is None:
            assert report["state"] == "over", part.name
            assert len(report["lines"]) == 2
        else:
            assert (report["state"], report["why"]) == ("failed", CRASHES[way]), part.name
            assert len(report["lines"]) == 1, "what it had reported is kept"
            assert f"{part.name}: {CRASHES[way]}" in text
            assert report["log"], "the end of its log is kept"


def test_a_part_that_hangs_says_where(tmp_path: Path) -> None:
    run(((Part("slow", HANG_LIMIT_S, f"{STUB}:hang"),),), tmp_path)
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        log = logs.extractfile("logs/slow.log")
        assert log is not None
        assert "gpu_check_parts.py" in log.read().decode(), "the stacks of all threads are in its log"


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    stages = (
        (Part("long", 2, f"{STUB}:hang"),),
        (Part("short", 40, f"{STUB}:fine"),),
        (Part("last", 100, f"{STUB}:fine"),),
    )
    found = run(stages, tmp_path, seconds=42.0)  # of its time, a part must have half to begin
    assert [found["parts"][name]["state"] for name in ("long", "short", "last")] == [
        "failed",
        "over",
        "not run",
    ]
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "NOT RUN, for want of time (1)\n  last" in text


def test_a_run_that_is_ended_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = (
        (Part("fast", 60, f"{STUB}:fine"),),
        (Part("slow", 60, f"{STUB}:hang"),),
        (Part("last", 60, f"{STUB}:fine"),),
    )
    ended = Run(stages, tmp_path / "out", tmp_path / "work", "cuda", SECONDS, {}, {"PYTHONPATH": str(TESTS)})
    write = ended.write

    def end_when_slow_has_reported() -> None:
        write()
        if ended.outcomes["slow"].lines and ended.outcomes["slow"].state is State.RUNNING:
            raise KeyboardInterrupt

    monkeypatch.setattr("splitserve.bench.gpu_check.running.WRITE_EACH_S", 0.0)
    monkeypatch.setattr(ended, "write", end_when_slow_has_reported)
    with pytest.raises(KeyboardInterrupt):
        ended.run()
    found = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert [found[name]["state"] for name in ("fast", "slow", "last")] == ["over", "failed", "not run"]
    assert found["slow"]["why"] == "the run was ended meanwhile"
    assert len(found["slow"]["lines"]) == 1


def test_no_more_parts_run_side_by_side_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tuple(Part(f"part {i}", 60, f"{STUB}:fine") for i in range(4))
    alone = Run(
        (stage,), tmp_path / "out", tmp_path / "work", "cuda", SECONDS, {}, {"PYTHONPATH": str(TESTS)}, 1
    )
    most, start = 0, alone._start

    def counted(part: Part, threads: int) -> Any:
        nonlocal most
        begun = start(part, threads)
        most = max(most, sum(outcome.state is State.RUNNING for outcome in alone.outcomes.values()))
        return begun

    monkeypatch.setattr(alone, "_start", counted)
    assert alone.run()
    assert most == 1
    assert all(outcome.state is State.OVER for outcome in alone.outcomes.values())


def test_no_process_of_a_part_outlives_it(tmp_path: Path) -> None:
    run(((Part("fork", 60, f"{STUB}:leave_behind"),),), tmp_path)
    pid = int((tmp_path / "work" / "left_behind").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_summary_names_first_what_is_wrong_then_figures_beside_their_goals() -> None:
    part, other = Part("engine", 10, "x:y"), Part("kernels", 10, "x:y")
    outcomes = [
        Outcome(
            part,
            State.OVER,
            5.0,
            lines=[
                Line("decode, batch 8", value=0.74, unit="share", at_least=0.8),
                Line("handoff", value=0.004, unit="share", at_most=0.02),
                Line("TTFT p50", value=12.5, unit="ms", headline=True),
                Line("kernel of no interest", value=0.5, unit="share"),
            ],
        ),
        Outcome(
            other,
            State.OVER,
            1.0,
            lines=[Line("norm", good=False, value=0.3, unit="error", note="allowed 0.005")],
        ),
        Outcome(
            Part("memcheck", 10, "x:y"),
            State.OVER,
            1.0,
            lines=[Line("memcheck", left_out=True, note="not installed")],
        ),
    ]
    text = summary(outcomes, {"gpu": "a GPU"}, 6.0, 570.0)
    order = [
        "WRONG (1)",
        "kernels: norm 0.3 error allowed 0.005",
        "memcheck: not installed",
        "MISSED THEIR GOAL (1)",
        "74.0% >= 80.0%   decode, batch 8",
        "MET THEIR GOAL (1)",
        "0.4% <= 2.0%",
        "12.5 ms",
        "PARTS (3)",
    ]
    places = [text.index(piece) for piece in order]
    assert places == sorted(places)
    assert "of no interest" not in text
    assert not Line("not a number", value=float("nan"), at_least=0.1).met


def test_the_plan_fits_and_all_of_it_exists() -> None:
    assert planned_seconds(STAGES) <= SECONDS <= 600 - INSTALLATION_S
    first = [part.name for stage in STAGES for part in stage][:-1]
    places = [
        first.index(name) for name in ("kernels 1", "serve cuda_ipc", "engine 8B", "failures", "serve fp8")
    ]
    assert places == sorted(places)
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, _, function = part.run.partition(":")
        assert callable(getattr(import_module(module), function)), part.run
        assert part.name in table() or part.name.startswith("kernels"), part.name


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text('{"what": "whole", "good": true}\n{"what": "ha')
    assert read_lines(file) == [Line("whole", good=True)]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(("seconds", "limit"), [(SECONDS / 2, 60.0), (SECONDS, 60.0), (2 * SECONDS, 120.0)])
def test_fewer_seconds_are_for_fewer_parts_and_shorten_none(
    tmp_path: Path, seconds: float, limit: float
) -> None:
    part = Part("fast", 60, f"{STUB}:fine")
    assert run(((part,),), tmp_path, seconds)["parts"]["fast"]["limit_s"] == limit


def test_a_second_call_begins_where_the_first_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen: list[Stages] = []

    class Chosen(Run):
        def run(self) -> bool:
            chosen.append(self.stages)
            self.write()
            return True

    monkeypatch.setattr("splitserve.bench.gpu_check.__main__.Run", Chosen)
    monkeypatch.setattr("splitserve.bench.gpu_check.__main__.signal.signal", lambda *_: None)
    first = [part.name for part in STAGES[0]]
    for begin, names in (("racecheck", [*first, "failures"]), ("compile", [*first, "kernels 1"])):
        options = ["--out", str(tmp_path), "--rehearse", "--begin", begin]
        monkeypatch.setattr("sys.argv", ["gpu_check", *options])
        assert main() == 0
        assert [part.name for stage in chosen[-1] for part in stage][:4] == names


@pytest.mark.parametrize("option", ["--only", "--begin"])
def test_an_unknown_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check", "--out", os.devnull, "--rehearse", option, "engine 9B"])
    with pytest.raises(SystemExit):
        main()
    assert "no part is named engine 9B; there are attention, blocks" in capsys.readouterr().err
