"""A cluster of paced workers: real processes, no weights."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from e2e.cluster import MODEL_NAME, running

from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Memory, Piece, Profile, StepModel
from splitserve.traces.readers import open_trace


def test_a_cluster_without_weights_answers_at_the_profiled_pace(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in DEMO_MODEL.glob("*.json"):
        shutil.copy(file, folder)
    path = tmp_path / "profile.json"
    prefill, decode = (StepModel(pieces=(Piece(curve=((0, seconds),)),)) for seconds in (0.2, 0.04))
    memory = Memory(block_size=16, num_blocks=64, block_bytes=1 << 16, num_layers=8, max_model_len=512)
    Profile(name="slow", memory=memory, prefill=prefill, decode=decode).write(path)
    with running(
        folder, tmp_path, "--runner", f"paced:{path}", "--trace-folder", str(tmp_path / "traces")
    ) as cluster:
        began = time.monotonic()
        answer = cluster.client.completions.create(
            model=MODEL_NAME, prompt=list(range(10, 50)), max_tokens=21, seed=4
        )
        took = time.monotonic() - began
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 21
    (trace,) = (tmp_path / "traces").iterdir()
    assert (40, 21) in [(r.num_prompt_tokens, r.num_output_tokens) for r in open_trace(trace)]
    assert took > 0.2 + 20 * 0.04 - 0.02
