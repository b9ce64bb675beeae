"""The check of a first start: ``splitserve up`` with nothing but a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from splitserve.bench.gpu_check import starting
from splitserve.bench.gpu_check.line import MACHINE_FILE, Place
from splitserve.bench.gpu_check.machine import SMALL
from splitserve.bench.kernels.device_mover_checks import received
from splitserve.bench.models import make_hollow_llama
from splitserve.engine.model.config import ModelConfig
from splitserve.engine.model.tensors import expected_tensors, ignored_tensors
from splitserve.engine.model.weights import Checkpoint

LOG = """\
decode-0  | 10:00:00 INFO KV cache: 2500 blocks of 64 tokens, 19.53 GiB
decode-0  | 10:00:00 WARNING max_model_len is 4000, not the model's 8000
prefill-0 | 10:00:00 INFO KV cache: 2500 blocks of 64 tokens, {second} GiB
"""


@pytest.mark.parametrize("name", list(starting.SHAPES))
def test_a_hollow_checkpoint_is_one_of_its_size_that_takes_no_disk(tmp_path: Path, name: str) -> None:
    make_hollow_llama(tmp_path, **{**starting.SHAPES[name], "num_hidden_layers": 2, "vocab_size": 500})
    config, file = ModelConfig.from_folder(tmp_path), tmp_path / "model.safetensors"
    assert file.stat().st_blocks * 512 < 100_000 < 50_000_000 < file.stat().st_size
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.check(expected_tensors(config), ignored_tensors(config))
        assert checkpoint.dtype == torch.bfloat16
        assert not checkpoint.tensor(config.tensors.embed + ".weight").any()


@pytest.mark.parametrize(("second", "good"), [(19.53, True), (2.0, False), (33.0, False)])
def test_workers_that_leave_the_card_idle_or_overfill_it_are_wrong(
    tmp_path: Path, second: float, good: bool
) -> None:
    (tmp_path / MACHINE_FILE).write_text(json.dumps({"memory": 80 * 2**30}))
    both, share = starting._memory(Place("cuda", True, tmp_path), "m", 15 * 2**30, LOG.format(second=second))
    assert (both.good, share.good) == (True, good)


def test_what_the_log_warns_of_is_kept() -> None:
    found = [match[0] for match in map(starting.NOTED.search, LOG.splitlines()) if match]
    assert found[1] == "WARNING max_model_len is 4000, not the model's 8000"
    assert found[0].startswith("KV cache: 2500")


def test_up_starts_and_answers(tmp_path: Path) -> None:
    place = Place("cpu", False, tmp_path)
    (tmp_path / "logs").mkdir()
    lines = list(starting.start(place, "Qwen3-0.6B"))
    assert [line.good for line in lines if line.good is not None] == [True] * 4
    assert SMALL["vocab_size"] > 0
    assert any("hands KV blocks to" in line.note for line in lines)


def test_a_process_that_hangs_costs_its_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import Pipe

    monkeypatch.setattr("splitserve.bench.kernels.device_mover_checks.DEADLINE_S", 0.01)
    ours, theirs = Pipe()
    with ours, theirs, pytest.raises(TimeoutError, match="does not answer"):
        received(ours)
