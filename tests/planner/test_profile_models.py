"""Latency models: their times, their fit, and their range of measurement."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from splitserve.bench.studies.splitwise_slo import splitwise_curves
from splitserve.engine.latency_profile import (
    HandoffModel,
    Memory,
    Piece,
    Profile,
    ProfileError,
    StepModel,
    shipped_names,
)
from splitserve.engine.step.batch import Batch, SamplingState
from splitserve.engine.step_clock import StepClock
from splitserve.planner.errors import ProfilingError
from splitserve.planner.profile.fit import PutPoint, StepPoint, fit_puts, fit_steps
from splitserve.planner.profile.published import import_published
from splitserve.planner.profile_commands import show
from splitserve.planner.settings import ProfileSettings
from splitserve.transport.messages.messages import SamplingParams

ROOT = Path(__file__).parents[2]
MEMORY = Memory(block_size=16, num_blocks=100, block_bytes=4096, num_layers=4, max_model_len=512)
PROFILE = Profile(
    name="test",
    memory=MEMORY,
    prefill=StepModel(
        pieces=(Piece(curve=((0, 0.01), (100, 0.02)), read_s=1e-6),), ranges={"units": (1, 128)}
    ),
    decode=StepModel(pieces=(Piece(curve=((0, 0.004), (10, 0.005)), read_s=1e-5),)),
)


def test_a_curve_is_linear_between_its_points_and_beyond_them() -> None:
    piece = Piece(curve=((10, 1.0), (20, 3.0), (40, 4.0)))
    assert [piece.seconds(x, 0, 0) for x in (5, 10, 15, 20, 30, 60)] == [0.0, 1.0, 2.0, 3.0, 3.5, 5.0]


def test_pieces_hold_up_to_their_bound() -> None:
    model = StepModel(pieces=(Piece(below=95, curve=((0, 1.0),)), Piece(curve=((0, 2.0),))))
    assert [model.seconds(x, 0, 0) for x in (94, 95, 1000)] == [1.0, 2.0, 2.0]


def test_a_chunk_attends_to_what_is_cached_and_to_itself() -> None:
    clock = StepClock(PROFILE)
    assert clock.prefill([(0, 100)]) == pytest.approx(0.02 + 1e-6 * 5050)
    assert clock.prefill([(50, 20), (0, 80)]) == pytest.approx(0.02 + 1e-6 * (50 * 20 + 210 + 3240))


def test_a_step_of_both_roles_pays_once_for_being_a_step() -> None:
    clock = StepClock(PROFILE)
    assert clock.mixed([(0, 100)], 10, 200) == pytest.approx(
        clock.prefill([(0, 100)]) + clock.decode(10, 200) - 0.004
    )
    assert clock.mixed([], 10, 200) == clock.decode(10, 200)


def test_a_batch_is_taken_apart_into_chunks_and_decoding_sequences() -> None:
    lens, new = (
        [30, 40, 8, 1],
        [1, 20, 8, 1],
    )  # decoding; a chunk after 20 cached; a new prompt; a prompt of one token
    state = SamplingState(SamplingParams(max_tokens=1), [], [])
    batch = Batch(
        np.zeros(30, np.int32), np.zeros(30, np.int32), np.cumsum([0, *new], dtype=np.int32),
        np.array(lens, np.int32), np.zeros((4, 3), np.int32), np.zeros(30, np.int64), [state] * 4,
    )  # fmt: skip
    clock = StepClock(PROFILE)
    assert clock.batch(batch) == clock.mixed([(20, 20), (0, 8), (0, 1)], 1, 30)


def test_leaving_the_measured_range_warns_once_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = StepClock(PROFILE)
    with caplog.at_level(logging.WARNING):
        clock.prefill([(0, 128)])
        assert not caplog.records
        clock.prefill([(0, 129)])
        clock.prefill([(0, 300)])
    assert len(caplog.records) == 1
    assert "outside the measured units (1 to 128)" in caplog.text
    assert clock.num_outside == {"prefill units": 2}


def test_less_than_was_measured_is_outside_too_and_so_is_more_that_is_cached() -> None:
    model = PROFILE.prefill.model_copy(update={"ranges": {"units": (16, 128), "cached": (0, 512)}})
    asked = ((15, 0), (16, 0), (128, 512), (128, 513), (129, 0))
    assert [model.outside(units, 0, 1, cached) for units, cached in asked] == [
        "units",
        "",
        "",
        "cached",
        "units",
    ]


def test_a_fit_finds_what_the_points_were_made_of() -> None:
    truth = StepModel(pieces=(Piece(curve=((1, 0.01), (64, 0.02), (512, 0.2)), read_s=3e-8, seq_s=2e-4),))
    draw = random.Random(0)
    points = []
    for _ in range(200):
        units, seqs = draw.choice((1, 16, 64, 100, 300, 512)), draw.choice((1, 2, 4))
        reads = units * draw.choice((10, 100, 1000))
        points.append(StepPoint(units, reads, seqs, truth.seconds(units, reads, seqs)))
    found = fit_steps(points, (1, 64, 512))
    assert found.residuals is not None
    assert found.residuals.worst < 1e-9
    assert found.pieces[0].seq_s == pytest.approx(2e-4)
    assert found.ranges["units"] == (1, 512)


def test_more_work_never_makes_a_fitted_step_quicker() -> None:
    points = [
        StepPoint(units, reads, 1, 0.01 + 1e-4 * units - 1e-6 * reads)
        for units in (1, 50, 100)
        for reads in (0, 1000)
    ]
    assert fit_steps(points, (1, 100)).pieces[0].read_s == 0


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    assert Profile.read(path) == PROFILE
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ProfileError, match=r"version: Input should be 1"):
        Profile.read(path)
    with pytest.raises(ProfileError, match="splitserve profile"):
        Profile.read(tmp_path / "none.json")


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_profiles_are_found_by_their_names(name: str, tmp_path: Path) -> None:
    found = Profile.read(Path(name))
    assert found.source
    assert found.prefill.seconds(2048, 2048 * 1024, 1) > found.prefill.seconds(256, 256 * 128, 1) > 0
    assert found.decode.seconds(32, 32 * 1024, 32) >= found.decode.seconds(1, 1024, 1) > 0
    with pytest.raises(ProfileError, match=f"shipped: .*{name}"):
        Profile.read(tmp_path / "none")


def test_a_change_of_role_takes_what_was_recorded_and_is_left_open_where_nothing_was() -> None:
    seconds = json.loads((ROOT / "bench/results/flip.json").read_text())["seconds"]
    slower_way = max(seconds[f"to {role}, began"]["median"] for role in ("prefill", "decode"))
    known = {name: Profile.read(Path(name)).flip_s for name in shipped_names()}
    assert known.pop("llama-125m-cpu") == slower_way
    assert set(known.values()) == {None}


@pytest.mark.parametrize("name", shipped_names())
def test_a_profile_is_shown_on_80_columns(name: str) -> None:
    written = StringIO()
    show(Profile.read(Path(name)), Console(file=written, width=80))
    lines = written.getvalue().splitlines()
    assert "…" not in written.getvalue()
    assert sum(line.split()[:1] in (["prefill,"], ["decode,"]) for line in lines) == 8, "one row a step"


# --- published data, in their formats --------------------------------------------------------------

SPLITWISE_HEAD = (
    "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,"
    "prompt_time,token_time,e2e_time,tensor_parallel\n"
)


def splitwise_file(folder: Path, tp: int = 8) -> Path:
    rows = [
        f"llama2-70b,h100-80gb,{p},1,128,1,0.7,{0.1 * p + 1e-5 * p * p},{30 + 1e-4 * p},0,{tp}"
        for p in (128, 512, 2048, 4096)
    ]
    rows += [
        f"llama2-70b,h100-80gb,512,{b},128,1,0.7,{0.1 * 512 * b},{30 + b + 1e-4 * 512 * b},0,{tp}"
        for b in (2, 8, 64)
    ]
    path = folder / "perf_model.csv"
    path.write_text(SPLITWISE_HEAD + "\n".join(rows) + "\n")
    return path


def test_splitwise_data_give_decode_times_over_sequences_and_context(tmp_path: Path) -> None:
    profile = import_published(splitwise_file(tmp_path), "llama2-70b", "h100-80gb", 8)
    assert profile.decode.seconds(64, 64 * 576, 64) == pytest.approx(0.094 + 1e-7 * 512 * 64, rel=0.02)
    assert profile.decode.pieces[0].read_s == pytest.approx(1e-7, rel=0.1)
    assert profile.memory.block_bytes == 64 * 2 * 80 * 1024 * 2


@pytest.mark.parametrize("tensor_parallel", [2, 4, 8])
def test_a_workers_kv_cache_is_what_the_weights_leave_of_its_own_gpus(
    tmp_path: Path, tensor_parallel: int
) -> None:
    profile = import_published(
        splitwise_file(tmp_path, tensor_parallel), "llama2-70b", "h100-80gb", tensor_parallel
    )
    left = tensor_parallel * 80 * 2**30 - 135e9  # bytes
    assert profile.gpus == tensor_parallel
    assert left - profile.memory.block_bytes < profile.memory.num_blocks * profile.memory.block_bytes <= left


def test_splitwise_itself_asks_its_decode_curve_for_sequences(tmp_path: Path) -> None:
    prompt, token = splitwise_curves(splitwise_file(tmp_path), "llama2-70b", "h100-80gb", 8)
    assert token.seconds(64, 0, 64) < token.seconds(128, 0, 128) == pytest.approx(0.0300128)
    assert prompt.seconds(4096, 0, 1) == pytest.approx(
        np.median([0.1 * 4096 + 1e-5 * 4096**2, 0.1 * 4096]) / 1e3
    )


def test_distserve_coefficients_keep_their_formula(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(
        '{"facebook/opt-13b": {"1": {"decoding_large_small_bs_threshold": 95, "prefill": [18, 0.1, 7e-6],'
        ' "decoding_smallbs": [20, 6e-4, 0.04], "decoding_largebs": [7, 5.8e-4, 0.16]}}}'
    )
    (tmp_path / "max_num_tokens.csv").write_text("model,tp,pp,max_num_tokens\nfacebook/opt-13b,1,1,66144\n")
    profile = import_published(path, "facebook/opt-13b", "", 1)
    assert StepClock(profile).prefill([(0, 300), (0, 50)]) == pytest.approx(
        (18 + 0.1 * 350 + 7e-6 * (300**2 + 50**2)) / 1e3
    )
    assert StepClock(profile).decode(94, 5000) == pytest.approx((20 + 6e-4 * 5000 + 0.04 * 94) / 1e3)
    assert StepClock(profile).decode(95, 5000) == pytest.approx((7 + 5.8e-4 * 5000 + 0.16 * 95) / 1e3)
    with pytest.raises(ProfilingError, match="has no facebook/opt-13b with tensor parallelism 2"):
        import_published(path, "facebook/opt-13b", "", 2)


def test_a_put_takes_its_time_and_that_of_its_bytes_and_more_for_blocks_of_some_layers() -> None:
    handoff = HandoffModel(put_s=1e-3, slice_s=1e-5, bytes_per_s=1e9)
    assert handoff.seconds(1e9) == pytest.approx(1.001)
    assert handoff.seconds(1e9, num_slices=100) == pytest.approx(1.002)


PUTS = [(1, 1), (1, 4), (1, 12), (21, 1), (21, 4), (21, 12), (170, 1)]
"""Blocks, and the puts in which each is cut by layers."""


def put_points(
    put_s: float, slice_s: float, once_s: float, block_s: Callable[[int], float]
) -> list[PutPoint]:
    return [
        PutPoint(
            num_blocks * 4096,
            puts,
            puts * num_blocks * (puts > 1),
            once_s + puts * (put_s + (puts > 1) * num_blocks * slice_s) + block_s(num_blocks),
        )
        for num_blocks, puts in PUTS
    ]


@pytest.mark.parametrize(
    ("put_s", "slice_s", "once_s"), [(1e-4, 2e-5, 3e-4), (0.0, 1e-6, 0.0), (5e-5, 0.0, 1e-4)]
)
def test_what_puts_slices_and_bytes_take_is_told_apart(put_s: float, slice_s: float, once_s: float) -> None:
    found = fit_puts(put_points(put_s, slice_s, once_s, lambda num_blocks: num_blocks * 4096 / 1e9))
    assert found.residuals is not None
    assert found.residuals.worst < 1e-3
    assert (found.put_s, found.slice_s, found.join_s) == pytest.approx((put_s, slice_s, once_s), abs=2e-8)
    assert found.bytes_per_s == pytest.approx(1e9, rel=1e-3)


def test_small_puts_that_stay_in_a_cache_are_not_taken_for_slices_that_cost_nothing() -> None:
    """Figures of the real machine: 9 GB/s for a block, 2.5 for all of them."""
    found = fit_puts(
        put_points(
            0.0, 1e-6, 0.0, lambda num_blocks: num_blocks * 4096 / (9e9 if num_blocks < 100 else 2.5e9)
        )
    )
    assert found.slice_s == pytest.approx(1e-6, rel=0.01)
    assert found.bytes_per_s == pytest.approx(2.5e9, rel=0.1)


def test_no_put_is_quicker_for_being_cut() -> None:
    found = fit_puts(
        [
            replace(p, seconds=p.seconds / (1 + 0.1 * p.num_slices))
            for p in put_points(1e-4, 0.0, 0.0, lambda n: n * 4e-6)
        ]
    )
    assert found.put_s >= 0
    assert found.slice_s == 0


def test_an_imported_profile_has_no_points_to_draw() -> None:
    with pytest.raises(ValidationError, match="--plot-file draws measured points"):
        ProfileSettings(published=Path("perf_model.csv"), plot_file=Path("fit.png"))
