"""Paced runners: they take the profiled time, without burning the core, and give tokens that a retry would
give again."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Memory, Piece, Profile, ProfileError, StepModel
from splitserve.engine.load_model import load_model
from splitserve.engine.paced_runner import PacedRunner
from splitserve.engine.settings import WorkerSettings
from splitserve.engine.step.batch import Batch, SamplingState
from splitserve.engine.worker_model import WorkerModel
from splitserve.transport.messages.messages import SamplingParams

MEMORY = Memory(block_size=16, num_blocks=64, block_bytes=1 << 20, num_layers=12, max_model_len=512)
EOS = frozenset({0, 2})


def profile(step_s: float, noise_cv: float = 0.0) -> Profile:
    model = StepModel(pieces=(Piece(curve=((0, step_s),)),))
    return Profile(name="test", memory=MEMORY, prefill=model, decode=model, noise_cv=noise_cv)


def batch(*states: SamplingState | None) -> Batch:
    n = len(states)
    column = np.zeros(n, np.int32)
    lens = np.array([s.position if s else 8 for s in states], np.int32)
    return Batch(
        column,
        lens - 1,
        np.arange(n + 1, dtype=np.int32),
        lens,
        np.zeros((n, 1), np.int32),
        column.astype(np.int64),
        states,
    )


def state(seed: int, num_prompt: int, num_output: int = 1, stops: tuple[int, ...] = ()) -> SamplingState:
    return SamplingState(
        SamplingParams(max_tokens=9, seed=seed, stop_token_ids=stops), [1] * num_prompt, [1] * num_output
    )


def test_steps_take_their_time_and_no_more_of_the_core_than_waking_up() -> None:
    runner = PacedRunner(profile(0.01), 1000, EOS, random.Random(0))
    began, worked = time.monotonic(), time.thread_time()
    for _ in range(20):
        runner.execute(batch(state(1, 5)))
    took, worked = time.monotonic() - began, time.thread_time() - worked
    assert took >= 0.199  # what one step oversleeps the next makes up for
    assert (
        worked < 0.5 * took
    )  # of both, where a hypervisor takes the core away and the kernel does not see it


def test_what_the_last_step_overslept_is_made_up_for_by_one_that_follows_at_once_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, oversleeps = [100.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + oversleeps.pop()

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    runner = PacedRunner(profile(0.2), 1000, EOS, random.Random(0))

    def took(pause: float, oversleeps_by: float) -> float:
        now[0] += pause
        began, oversleeps[:] = now[0], [oversleeps_by]
        runner.execute(batch(state(1, 5)))
        return now[0] - began

    assert took(0.0, 0.15) == pytest.approx(0.35)
    assert took(0.001, 0.0) == pytest.approx(0.05)
    assert took(0.001, 0.15) == pytest.approx(0.35)
    assert took(3.0, 0.0) == pytest.approx(0.2)


def test_layers_are_reported_in_order_while_the_step_runs() -> None:
    runner = PacedRunner(profile(0.08), 1000, EOS, random.Random(0))
    began, seen = time.monotonic(), []
    runner.execute(batch(None), lambda layer: seen.append((layer, time.monotonic() - began)))
    assert [layer for layer, _ in seen] == list(range(1, 13))
    assert all(at >= 0.08 * layer / 12 - 0.08 / 8 for layer, at in seen)


def test_a_token_depends_on_seed_and_position_alone_and_ends_nothing() -> None:
    runner = PacedRunner(profile(0.0), 50, EOS, random.Random(0))
    alone = runner.execute(batch(state(7, 5, 3)))
    shared = runner.execute(batch(state(1, 9), state(7, 8, 0), None))
    assert alone.token_ids[0] == shared.token_ids[1]
    assert shared.token_ids[2] == -1
    stops = tuple(range(10, 40))
    drawn = {int(runner.execute(batch(state(seed, 4, stops=stops))).token_ids[0]) for seed in range(60)}
    assert not drawn & {*EOS, *stops}


def test_an_embedding_has_the_models_size() -> None:
    runner = PacedRunner(profile(0.0), 50, EOS, random.Random(0), hidden_size=6)
    found = runner.execute(replace(batch(None, None, None), embeds=[None, (), (4, 9)])).embeddings
    assert {row: vector.shape for row, vector in found.items()} == {1: (6,), 2: (2,)}


def test_noise_keeps_the_mean() -> None:
    runner = PacedRunner(profile(0.0, noise_cv=0.3), 50, EOS, random.Random(0))
    factors = [runner._factor() for _ in range(4000)]
    assert np.mean(factors) == pytest.approx(1.0, abs=0.02)
    assert np.std(factors) == pytest.approx(0.3, abs=0.03)


def worker_model(folder: Path, **options: object) -> WorkerModel:
    path = folder / "profile.json"
    profile(0.01).write(path)
    return load_model(
        WorkerSettings.model_validate(
            {"model": DEMO_MODEL, "insecure": True, "runner": f"paced:{path}", **options}
        )
    )


def test_a_worker_has_the_profiles_blocks_cut_down_to_fit(tmp_path: Path) -> None:
    model = worker_model(tmp_path)
    assert model.pool.shape[:2] == (64, 12)
    assert (1 << 25) < model.pool.nbytes <= (1 << 26)
    assert worker_model(tmp_path, kv_cache_gib=1).identity.block_bytes == pytest.approx(1 << 20, rel=1e-4)


def test_what_the_profile_does_not_cover_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="blocks of 16 tokens"):
        worker_model(tmp_path, block_size=32)
    with pytest.raises(ProfileError, match="more than the 512"):
        worker_model(tmp_path, max_model_len=1024)
