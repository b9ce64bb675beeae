"""A reranker as sentence-transformers saves it: scores are those of transformers, also over the death of the
worker that computes them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from e2e.cluster import MODEL_NAME, running
from support.models import make_checkpoint
from tokenizers import Tokenizer
from transformers import PreTrainedModel

YES, NO = 121, 110
QUERY, DOCUMENTS = "which fox is quick", ["a dog", "the quick brown fox " * 9, "foxes", "a", "b" * 300]


def make_reranker(path: Path) -> PreTrainedModel:
    model = make_checkpoint(path, "qwen3", max_position_embeddings=4096)
    path_of = {"Transformer": "", "LogitScore": "1_LogitScore"}
    modules = [{"path": at, "type": f"sentence_transformers.{kind}"} for kind, at in path_of.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    tokens = {"true_token_id": YES, "false_token_id": NO}
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    config = path / "tokenizer_config.json"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# query document #}?"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return model.float().eval()


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_reranker(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))

    @torch.inference_mode()
    def expected(document: str) -> float:
        ids = tokenizer.encode(f"<query>{QUERY}<document>{document}?", add_special_tokens=False).ids
        logits = model(torch.tensor([ids])).logits[0, -1]
        return float(torch.sigmoid(logits[YES] - logits[NO]))

    scores = [expected(document) for document in DOCUMENTS]
    body: Any = {"model": MODEL_NAME, "query": QUERY, "documents": DOCUMENTS, "top_n": 4}
    with running(tmp_path / "model", tmp_path, "--prefill", "2", "--decode", "1") as cluster:
        best = sorted(range(5), key=lambda i: -scores[i])[:4]

        def check() -> None:
            answer = httpx.post(f"{cluster.url}/v1/rerank", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            results = answer.json()["results"]
            assert [each["index"] for each in results] == best
            found = [each["relevance_score"] for each in results]
            np.testing.assert_allclose(found, [scores[i] for i in best], atol=1e-5)

        check()
        os.kill(cluster.workers("prefill")[0]["pid"], signal.SIGKILL)
        check()
