"""What the caches have evicted comes back from the KV store with the same bits, also after a restart."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster import MODEL_NAME, Cluster, running, wait_for
from transformers import PreTrainedModel

BLOCK, NUM_TOKENS = 16, 20
DOCUMENTS = [[(7 * i + number) % 250 + 3 for i in range(300)] for number in range(5)]


def ask(cluster: Cluster, number: int) -> tuple[list[int], int]:
    """Return the answer's tokens, and how many of the document's were cached."""
    more = {"ignore_eos": True, "return_token_ids": True}
    answer = cluster.client.completions.create(
        model=MODEL_NAME,
        prompt=DOCUMENTS[number],
        max_tokens=NUM_TOKENS,
        temperature=1.0,
        seed=7,
        extra_body=more,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    tokens = answer.choices[0].model_dump()["token_ids"]
    return tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def counted(cluster: Cluster, name: str) -> float:
    return sum(worker["counters"].get(name, 0) for worker in cluster.state()["workers"])


def test_evicted_blocks_are_read_back(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = ["--kv-store", str(store), "--run-dir", str(tmp_path / "run"), "--exact"]
    arguments += ["--num-blocks", "48", "--max-model-len", "512"]
    numbers = range(len(DOCUMENTS))
    with running(tiny[0], tmp_path, *arguments) as cluster:
        expected = [ask(cluster, number) for number in numbers]
        assert {cached for _, cached in expected} == {0}
        num_full = len(DOCUMENTS) * ((300 + NUM_TOKENS - 1) // BLOCK)  # the last token has no KV
        wait_for("all is saved", lambda: len(list(store.glob(f"kv-*/??/{'?' * 32}"))) == num_full)
        for number in numbers:
            cluster.wait_reported()
            assert ask(cluster, number) == (expected[number][0], 18 * BLOCK)
        cluster.wait_reported()
        assert counted(cluster, "loaded_tokens") >= 2 * 18 * BLOCK, "at least what two caches cannot hold"
        cluster.wait_at_rest()
    for path in sorted(store.glob("kv-*/??/*"))[::7]:
        path.write_bytes(path.read_bytes()[:-1])
    with running(tiny[0], tmp_path, *arguments) as cluster:
        again = [ask(cluster, number) for number in numbers]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]
        assert sum(cached for _, cached in again) > 0
        cluster.wait_reported()
        assert counted(cluster, "loaded_tokens") == sum(cached for _, cached in again)
        cluster.wait_at_rest()
    assert "is damaged: it is removed" in (tmp_path / "up.log").read_text()
