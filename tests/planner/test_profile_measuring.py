"""Measuring a profile: what is designed can run, and what is measured is found again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Memory, Numerics, Piece, Profile, StepModel
from splitserve.engine.load_model import load_model
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step_clock import StepClock
from splitserve.planner import profile_commands
from splitserve.planner.profile.design import Bounds, experiments
from splitserve.planner.profile.flip import measure_flip
from splitserve.planner.profile.handoff import MAX_REPEATS as MAX_PUTS
from splitserve.planner.profile.handoff import MIN_REPEATS as MIN_PUTS
from splitserve.planner.profile.handoff import measure_movers, repeated
from splitserve.planner.profile.measure import (
    MIN_REPEATS,
    batch_of,
    decode_loop_s,
    fitted,
    measure,
    noise_cv,
    uncertainty_of,
)
from splitserve.planner.profile.power import measure_power
from splitserve.planner.settings import ProfileSettings
from splitserve.worker.played_role import PlayedRole
from splitserve.worker.settings import FlexibleSettings

KV_CACHE_GIB = 0.01
BOUNDS = Bounds(max_batch_tokens=256, max_num_seqs=32, max_model_len=1024, num_blocks=512, block_size=16)
TRUTH = Profile(
    name="truth",
    memory=Memory(block_size=16, num_blocks=512, block_bytes=1024, num_layers=4, max_model_len=1024),
    prefill=StepModel(
        pieces=(Piece(curve=((1, 0.005), (256, 0.08)), read_s=2e-8, seq_s=1e-4, cached_s=3e-6),)
    ),
    decode=StepModel(pieces=(Piece(curve=((1, 0.004), (32, 0.012)), read_s=1e-7),)),
)


class Machine:
    """A runner that takes the time of ``TRUTH`` on a clock of its own; every tenth step takes twice as
    long."""

    def __init__(self) -> None:
        self.now, self.num_steps, self._times = 0.0, 0, StepClock(TRUTH)

    def clock(self) -> float:
        return self.now

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        self.num_steps += 1
        self.now += self._times.batch(batch) * (2.0 if self.num_steps % 11 == 0 else 1.0)
        return StepOutput(np.zeros(batch.num_seqs, np.int32))


def test_every_designed_step_fits_the_worker() -> None:
    designed = experiments(BOUNDS)
    assert all(BOUNDS.fits(e.sequences) for e in designed)
    assert {(e.role, e.held_out) for e in designed} == {
        (role, held) for role in ("prefill", "decode") for held in (False, True)
    }
    assert max(e.units for e in designed if e.role == "prefill") == 256
    for e in designed:
        batch = batch_of(e, BOUNDS.block_size)
        assert batch.block_tables.max() < BOUNDS.num_blocks
        assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens  # no two tokens in one place


def test_what_is_measured_is_found_again_in_spite_of_outliers() -> None:
    machine = Machine()
    found = measure(
        machine,
        16,
        experiments(BOUNDS),
        precision=0.02,
        budget_s=1e9,
        progress=lambda _: None,
        clock=machine.clock,
    )
    for role, truth in (("prefill", TRUTH.prefill), ("decode", TRUTH.decode)):
        model = fitted(found, role, BOUNDS)  # type: ignore[arg-type]
        assert model.held_out is not None
        assert model.held_out.mean < 0.05
        assert model.pieces[0].read_s == pytest.approx(truth.pieces[0].read_s, rel=0.4)


def test_the_time_allowed_ends_the_measuring_but_not_before_each_step_ran_a_few_times() -> None:
    machine, known = Machine(), []
    found = measure(
        machine,
        16,
        experiments(BOUNDS),
        precision=1e-9,
        budget_s=1.0,
        progress=known.append,
        clock=machine.clock,
    )
    assert {len(r.times) for r in found} == {MIN_REPEATS}
    assert known[-1] == len(found)
    assert noise_cv(found) >= 0


@pytest.mark.parametrize(
    ("noise", "least", "most"),
    [(0.0, MIN_PUTS, MIN_PUTS), (0.3, MIN_PUTS + 1, MAX_PUTS - 1), (2.0, MAX_PUTS, MAX_PUTS)],
)
def test_a_put_is_repeated_until_its_time_is_known_or_it_has_run_often_enough(
    noise: float, least: int, most: int
) -> None:
    draw = random.Random(1)
    found = repeated(lambda: 1.0 + noise * draw.random(), precision=0.02)
    assert least <= len(found) <= most
    assert (uncertainty_of(found) <= 0.02) == (noise < 1)


def test_the_handoff_and_the_loop_of_this_machine_can_be_measured() -> None:
    movers = measure_movers(block_bytes=1 << 20, num_layers=4, precision=0.5)
    assert set(movers) == {"shm", "tcp"}
    for handoff in movers.values():
        assert 1e5 < handoff.bytes_per_s < 1e12
        assert 0 < handoff.message_s < 1
    assert 0 < decode_loop_s(4, num_steps=20) < 1


def test_a_change_of_role_is_timed_on_real_workers_that_no_coordinator_hears_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TRUTH.write(tmp_path / "profile.json")
    runner = f"paced:{tmp_path / 'profile.json'}"
    options = {
        "model": DEMO_MODEL,
        "runner": runner,
        "insecure": True,
        "num_blocks": 64,
        "block_size": 16,
        "device": "cpu",
    }
    settings = FlexibleSettings.model_validate({**options, "max_batch_tokens": 64, "max_num_seqs": 8})
    model = load_model(settings, max_decode_seqs=8, prefill_tokens=lambda device: 64)
    made: list[tuple[str, str]] = []
    begin = PlayedRole.__init__

    def noted(role: PlayedRole, settings: FlexibleSettings, *rest: object) -> None:
        made.append((role.role, settings.coordinator))
        begin(role, settings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PlayedRole, "__init__", noted)
    assert 0 < measure_flip(model, settings, num_flips=2) < 30
    assert [role for role, _ in made] == ["prefill", "decode", "prefill"]
    assert settings.coordinator not in {coordinator for _, coordinator in made}


class Driver:
    """Reports the watts of the last activity, on a clock of its own."""

    def __init__(self, shows: bool = True) -> None:
        self.now, self.drawn, self._shows = 0.0, 70.0, shows
        self.gauges: dict[str, float] = {}

    def sample(self) -> None:
        self.gauges = {"gpu_power_watts": self.drawn} if self._shows else {}

    def step(self, watts: float) -> None:
        self.now, self.drawn = self.now + 0.04, watts

    def clock(self) -> float:
        self.now += 0.01
        return self.now


def test_power_is_told_apart_by_what_the_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    driver, silent = Driver(), Driver(shows=False)
    power = measure_power(driver, lambda: driver.step(600.0), lambda: driver.step(350.0), driver.clock)
    assert power is not None
    assert (power.idle_w, power.prefill_w, power.decode_w) == pytest.approx((70, 600, 350))
    assert measure_power(silent, lambda: None, lambda: None, silent.clock) is None


@pytest.mark.parametrize(("kv_dtype", "ranks"), [("auto", 2), ("fp8", 1)])
def test_the_command_profiles_a_model_in_the_types_and_ranks_that_it_names(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kv_dtype: str,
    ranks: int,
) -> None:
    monkeypatch.setattr(profile_commands, "PRECISION", 1.0)
    made = tmp_path / "p.json"
    settings = {
        "model": DEMO_MODEL, "output": made, "device": "cpu", "dtype": "float32", "kv_dtype": kv_dtype,
        "max_batch_tokens": 64, "max_num_seqs": 4, "max_model_len": 256, "kv_cache_gib": KV_CACHE_GIB,
        "budget_s": 0.1, "contention_s": 0.0, "tensor_parallel_size": ranks,
    }  # fmt: skip
    assert profile_commands.profile(ProfileSettings.model_validate(settings)) == 0
    found = Profile.read(made)
    assert found.numerics == Numerics(dtype="float32", kv_dtype=kv_dtype)  # type: ignore[arg-type]
    assert found.memory.num_blocks == int(KV_CACHE_GIB * 2**30) // found.memory.block_bytes
    assert set(found.movers) == {"shm", "tcp"}
    assert (found.gpus, found.name.endswith(" tp2")) == (ranks, ranks == 2), "as a plan launches it"
    assert found.decode.seconds(4, 400, 4) > 0
    assert ("computed in float32, KV cache in fp8" in capsys.readouterr().out) == (kv_dtype == "fp8")
