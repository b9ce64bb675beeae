"""One coordinator, two models with workers of their own: each answers as alone, and what happens to one's
workers is nothing to the other's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import yaml
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for
from support.models import make_checkpoint
from transformers import PreTrainedModel

OTHER = "other"
PROMPT = [(i * 13 + i // 7) % 250 for i in range(100)]


def test_each_answers_as_alone(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    models = {MODEL_NAME: tiny[1], OTHER: make_checkpoint(folder, "qwen3", seed=5)}
    config = tmp_path / "cluster.yaml"
    pools = [{"role": role, "count": 1, "model": OTHER} for role in ("prefill", "decode")]
    other = {"model": str(folder), "served_model_name": OTHER}
    config.write_text(yaml.safe_dump({"coordinator": {"other_models": [other]}, "up": {"pools": pools}}))
    arguments = ("--config", str(config), "--kv-cache-gib", "0.1", *NEVER_DEAD)
    with running(tiny[0], run, *arguments) as cluster:
        for name, model in models.items():
            assert answer(cluster, name, 24) == greedy(model, PROMPT, 24)
        assert {worker["worker_id"] for worker in cluster.state()["workers"]} == {"prefill-0", "decode-0"}

        killed = others_workers(cluster)["decode-1"]
        os.kill(killed, signal.SIGKILL)
        assert answer(cluster, MODEL_NAME, 200) == greedy(tiny[1], PROMPT, 200)
        wait_for(
            "the other model's decode worker is back",
            lambda: (
                others_workers(cluster).get("decode-1", killed) != killed
                and HTTP.get(f"{cluster.url}/ready?model={OTHER}").status_code == 200
            ),
        )
        assert answer(cluster, OTHER, 24) == greedy(models[OTHER], PROMPT, 24)
        assert cluster.state()["counters"]["workers_lost"] == 0
        cluster.wait_at_rest()


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Transformers' answer."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


def others_workers(cluster: Cluster) -> dict[str, int]:
    """Process ids by name."""
    workers = cluster.state()["models"][OTHER]["workers"]
    return {worker["worker_id"]: worker["pid"] for worker in workers}


def answer(cluster: Cluster, model: str, count: int) -> list[int]:
    found = cluster.client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=count,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    token_ids: list[int] = found.choices[0].model_dump()["token_ids"]
    return token_ids
