"""Measuring contention: the cost of a neighbour is found again, and the neighbour's process computes on
demand and does not outlive this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planner.test_profile_measuring import BOUNDS, TRUTH

from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Contention, Profile, ProfileError, StepRole
from splitserve.engine.settings import WorkerSettings
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step_clock import StepClock
from splitserve.planner.errors import ProfilingError
from splitserve.planner.profile.contention import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    Beside,
    contention_of,
    measure_contention,
    shapes,
)
from splitserve.planner.profile.design import Bounds
from splitserve.planner.profile.neighbour import NeighbourProcess
from splitserve.planner.profile_commands import contention_words

COSTS = Contention(
    prefill_beside_prefill=1.0,
    prefill_beside_decode=1.1,
    decode_beside_prefill=1.6,
    decode_beside_decode=1.25,
)


class Host:
    """A runner and its neighbour on a clock of their own: steps take the time of ``TRUTH`` times what the
    neighbour costs; every eighth one is interrupted."""

    def __init__(self) -> None:
        self.now, self.num_steps, self._times = 0.0, 0, StepClock(TRUTH, warns=False)
        self.beside: StepRole | None = None
        self.reported: list[StepRole | None] = []

    def clock(self) -> float:
        return self.now

    def compute(self, role: StepRole | None) -> None:
        self.beside = role
        self.reported.append(role)

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        self.num_steps += 1
        role = "decode" if (np.diff(batch.query_start_loc) == 1).all() else "prefill"
        cost = getattr(COSTS, f"{role}_beside_{self.beside}") if self.beside else 1.0
        self.now += self._times.batch(batch) * cost * (3.0 if self.num_steps % 37 == 0 else 1.0)
        return StepOutput(np.zeros(batch.num_seqs, np.int32))


def measured(host: Host, precision: float = 0.01, budget_s: float = 1e9) -> list[Beside]:
    return measure_contention(
        host,
        host,
        16,
        shapes(BOUNDS),
        precision,
        budget_s,
        lambda _: None,
        clock=host.clock,
        processor_clock=host.clock,
    )


def test_what_a_neighbour_costs_is_found_again_in_spite_of_interruptions() -> None:
    found = contention_of(measured(Host()))
    for name in (
        "prefill_beside_prefill",
        "prefill_beside_decode",
        "decode_beside_prefill",
        "decode_beside_decode",
    ):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=0.03)
        least, most = found.ranges[name]
        assert least <= getattr(COSTS, name) * 1.001
        assert most >= getattr(COSTS, name) * 0.999


def test_the_time_allowed_ends_the_measuring_but_not_before_a_few_rounds() -> None:
    host = Host()
    assert {len(b.ratios) for b in measured(host, precision=1e-9, budget_s=1.0)} == {MIN_ROUNDS}
    assert host.reported[-1] is None
    assert {len(b.ratios) for b in measured(Host(), precision=1e-9)} == {MAX_ROUNDS}


@pytest.mark.parametrize("bounds", [BOUNDS, Bounds(1, 1, 8, 2, 16), Bounds(512, 64, 2048, 100, 16)])
def test_the_shapes_fit_the_worker_however_small(bounds: Bounds) -> None:
    found = shapes(bounds)
    assert all(bounds.fits(e.sequences) for e in found)
    assert {e.role for e in found} == {"prefill", "decode"}
    assert max(e.units for e in found if e.role == "decode") == bounds.max_num_seqs


def test_a_neighbour_that_seems_to_help_costs_nothing() -> None:
    roles: tuple[StepRole, ...] = ("prefill", "decode")
    chance = [Beside(e, role, [0.97, 0.98, 0.99]) for e in shapes(BOUNDS) for role in roles]
    found = contention_of(chance)
    assert found.decode_beside_prefill == 1.0
    assert found.ranges["decode_beside_prefill"] == (0.98, 0.98)


def test_a_profile_keeps_the_part_and_says_it_and_an_older_one_has_none(tmp_path: Path) -> None:
    TRUTH.write(tmp_path / "old.json")
    assert "contention" not in (tmp_path / "old.json").read_text()
    assert contention_words(Profile.read(tmp_path / "old.json").contention) == []
    known = TRUTH.model_copy(update={"contention": contention_of(measured(Host()))})
    known.write(tmp_path / "new.json")
    again = Profile.read(tmp_path / "new.json")
    assert again == known
    assert len([line for line in contention_words(again.contention) if "times as long (" in line]) == 4
    newer = (
        (tmp_path / "new.json")
        .read_text()
        .replace('"contention": {\n  "version": 1', '"contention": {\n  "version": 2')
    )
    (tmp_path / "newer.json").write_text(newer)
    with pytest.raises(ProfileError, match=r"contention\.version"):
        Profile.read(tmp_path / "newer.json")


def paced(folder: Path) -> WorkerSettings:
    TRUTH.write(folder / "profile.json")
    return WorkerSettings(
        model=DEMO_MODEL,
        runner=f"paced:{folder / 'profile.json'}",
        insecure=True,
        num_blocks=512,
        block_size=16,
        device="cpu",
    )


def test_the_neighbour_is_a_process_that_computes_as_told(tmp_path: Path) -> None:
    with NeighbourProcess(paced(tmp_path), BOUNDS, shapes(BOUNDS)) as neighbour:
        for role in ("prefill", None, "decode", "prefill", None):
            neighbour.compute(role)  # type: ignore[arg-type]
        process = neighbour._process
        assert process.is_alive()
    assert process.exitcode == 0


def test_a_neighbour_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    settings = paced(tmp_path).model_copy(update={"model": tmp_path / "none"})
    with (
        pytest.raises(ProfilingError, match="process has ended"),
        NeighbourProcess(settings, BOUNDS, shapes(BOUNDS)),
    ):
        pass


DIES = """
import os, signal, sys
from pathlib import Path
from planner.test_profile_contention import BOUNDS, NeighbourProcess, paced, shapes

if __name__ == "__main__":
    neighbour = NeighbourProcess(paced(Path(sys.argv[1])), BOUNDS, shapes(BOUNDS)).__enter__()
    neighbour.compute("decode")
    print("computing", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_neighbour_ends_when_the_profiling_process_is_killed(tmp_path: Path) -> None:
    """It holds the output open: reading that to its end waits for it."""
    (tmp_path / "dies.py").write_text(DIES)
    paths = ":".join(p for p in (str(Path(__file__).parents[1]), *sys.path) if p)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "dies.py"), str(tmp_path)],
        env={"PYTHONPATH": paths},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (-9, b"computing\n")
