"""A cluster whose model drafts by its own layer answers as without it: that layer's keys and values travel
and are cached with the others, and each draft is verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.cluster import MODEL_NAME, NEVER_DEAD, running
from support.prediction import make_predicting


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek3", "glm_moe_dsa"])
def test_answers_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    reference = make_predicting(model, family, num_hidden_layers=9)  # of few, a draft costs too much
    arguments = ("--mtp", "--num-blocks", "200", "--block-size", "16", "--dtype", "float32", *NEVER_DEAD)
    arguments += ("--decode-num-speculative-tokens", "3")
    with running(model, run, *arguments) as cluster:
        cached = []
        for last in (4, 4, 5):
            prompt = [*[(i * 13 + i // 7) % 250 for i in range(100)], last]
            answer = cluster.client.completions.create(
                model=MODEL_NAME,
                prompt=prompt,
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.choices[0].model_dump()["token_ids"] == reference.answer(prompt, 24)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert cached == [0, 96, 96]
        cluster.wait_reported()
        assert cluster.workers("decode")[0]["counters"]["mtp_draft_tokens"] > 0
        cluster.wait_at_rest()
