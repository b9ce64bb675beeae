"""Workers of both roles, without any other: they generate for what they compute, of which next to nothing
moves, and one that dies takes no stream along."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from e2e.cluster import NEVER_DEAD, running, wait_for
from e2e.test_failure import Streams
from transformers import PreTrainedModel

NUM_TOKENS = 300
PROMPTS = [f"mixed {i} " + "uvw" * (40 * i) for i in range(4)]


def test_mixed_workers_serve_alone(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    arguments = (
        "--prefill",
        "0",
        "--decode",
        "0",
        "--mixed",
        "2",
        "--kv-cache-gib",
        "0.1",
        "--exact",
        "--dtype",
        "float32",
        *NEVER_DEAD,
    )
    with running(tiny[0], tmp_path, *arguments) as cluster:
        cluster.wait_whole(2, 2)
        expected = Streams(cluster, PROMPTS, NUM_TOKENS).texts()
        cluster.wait_at_rest()
        for worker in cluster.workers("prefill"):
            counters, block_bytes = worker["counters"], worker["model"]["block_bytes"]
            assert counters["handoff_bytes"] <= counters["output_tokens"] * block_bytes, (
                "of each prompt the last block, where it is partial"
            )
        streams = Streams(cluster, PROMPTS, NUM_TOKENS)
        streams.wait_under_way()
        victim = cluster.busy_worker("decode")
        os.kill(victim["pid"], signal.SIGKILL)
        wait_for(
            "the loss is noticed",
            lambda: victim["incarnation"] not in [w["incarnation"] for w in cluster.workers("decode")],
        )
        assert streams.texts() == expected
        cluster.wait_whole(2, 2)
        cluster.wait_at_rest()
