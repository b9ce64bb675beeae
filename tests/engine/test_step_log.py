"""The log has each step once, with its contents, and times that add up to the device's busy time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from splitserve.bench.handoff.live_pace import modelled_s, read_step_logs
from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Memory, Piece, Profile, StepModel
from splitserve.engine.load_model import load_model
from splitserve.engine.settings import WorkerSettings
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step_log import LoggedStep, StepLogError, logged

STEP_S = 0.03
PROFILE = Profile(
    name="test",
    memory=Memory(block_size=16, num_blocks=64, block_bytes=1 << 16, num_layers=2, max_model_len=512),
    prefill=StepModel(pieces=(Piece(curve=((0, STEP_S), (64, 2 * STEP_S))),)),
    decode=StepModel(pieces=(Piece(curve=((0, STEP_S),), read_s=1e-5),)),
)


def batch(*sequences: tuple[int, int]) -> Batch:
    """(cached tokens before, new tokens) of each."""
    lens = np.array([cached + new for cached, new in sequences], np.int32)
    starts = np.cumsum([0, *(new for _, new in sequences)], dtype=np.int32)
    tokens = np.zeros(starts[-1], np.int32)
    tables = np.zeros((len(sequences), 32), np.int32)
    return Batch(tokens, tokens, starts, lens, tables, tokens.astype(np.int64), [None] * len(sequences))


def settings(tmp_path: Path, **changed: object) -> WorkerSettings:
    PROFILE.write(tmp_path / "profile.json")
    options = {
        "model": DEMO_MODEL,
        "insecure": True,
        "name": "decode/0",
        "runner": f"paced:{tmp_path / 'profile.json'}",
    }
    return WorkerSettings.model_validate({**options, "step_log": tmp_path / "steps", **changed})


def test_each_step_is_a_line_and_the_profile_can_be_asked_for_it(tmp_path: Path) -> None:
    runner = load_model(settings(tmp_path)).runner
    began = time.monotonic()
    runner.execute(batch((0, 32), (16, 32)))
    runner.execute(batch((99, 1), (199, 1)))
    ended = time.monotonic()
    prompts, answers = read_step_logs(tmp_path / "steps")
    assert prompts[2:] == ("0+32 16+32", 0, 0)
    assert answers[2:] == ("", 2, 300)
    assert (prompts.role, answers.role) == ("prefill", "decode")
    assert modelled_s(prompts, PROFILE) == pytest.approx(2 * STEP_S)
    assert modelled_s(answers, PROFILE) == pytest.approx(STEP_S + 300e-5)
    assert prompts.seconds >= 2 * STEP_S - 0.001
    assert began - 0.001 <= prompts.began <= answers.began <= ended
    assert prompts.seconds + answers.seconds <= ended - began + 0.001


def test_without_being_asked_it_writes_none(tmp_path: Path) -> None:
    load_model(settings(tmp_path, step_log=None)).runner.execute(batch((0, 8)))
    assert not (tmp_path / "steps").exists()


def test_a_step_that_is_launched_ahead_counts_from_the_end_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def launch(batch: Batch, on_layer: object = None) -> Callable[[], StepOutput]:
        return lambda: StepOutput(np.zeros(batch.num_seqs, np.int32))

    model = replace(load_model(settings(tmp_path, step_log=None)), launch=launch)
    launched = logged(model, tmp_path / "steps", "w").launch
    assert launched is not None
    first = launched(batch((9, 1)))
    now[0] = 10.1
    second = launched(batch((9, 1)))
    for wait, ends in ((first, 11.0), (second, 11.5)):
        now[0] = ends
        wait()
    times = [(step.began, step.seconds) for step in read_step_logs(tmp_path / "steps")]
    assert times == [(10.0, 1.0), (11.0, 0.5)]


def test_a_folder_that_cannot_be_written_and_a_file_that_is_no_log_are_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StepLogError, match=r"taken.*choose another --step-log folder"):
        load_model(settings(tmp_path, step_log=tmp_path / "taken"))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(StepLogError, match=r"other\.csv is no step log"):
        list(read_step_logs(tmp_path))
    assert LoggedStep(0.0, 1.0, "", 1, 5).role == "decode"
