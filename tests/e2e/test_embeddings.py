"""Embeddings from a real cluster: a checkpoint as sentence-transformers saves it, without a head, whose
vectors are those of transformers; through OpenAI's and Ollama's clients; by keys with limits; over a worker's
death."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
import torch
from e2e.cluster import MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for
from openai import OpenAI
from support.models import make_checkpoint
from tokenizers import Tokenizer, processors
from transformers import AutoModel, PreTrainedModel, Qwen3ForCausalLM

from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.usage_database import open_database

EOS, CHUNK = 257, 64
TEXTS = ["a", "the fox", "the quick brown fox jumps over the lazy dog " * 9]


class Embedder:
    """The cluster, transformers' own model, and a client of each tenant."""

    def __init__(self, cluster: Cluster, folder: Path, reference: PreTrainedModel, keys: Any) -> None:
        self.cluster, self.folder, self.reference, self.keys = cluster, folder, reference, keys
        url = f"{cluster.url}/v1"
        self.clients = {
            tenant: OpenAI(base_url=url, api_key=key, max_retries=0, timeout=90)
            for tenant, key in keys.items()
        }

    def client(self, tenant: str = "a") -> OpenAI:
        return self.clients[tenant]

    @torch.inference_mode()
    def expected(self, text: str, dimensions: int | None = None) -> Any:
        ids = Tokenizer.from_file(str(self.folder / "model" / "tokenizer.json")).encode(text).ids
        assert ids[-1] == EOS
        state = self.reference(torch.tensor([ids])).last_hidden_state[0, -1, :dimensions].numpy()
        return state / np.linalg.norm(state)

    def used(self, tenant: str) -> Any:
        rows = open_database(f"sqlite:///{self.folder}/tenants-usage").totals(["tenant"], 0, 1e12)
        return next((row for row in rows if row["tenant"] == tenant), None)


def make_embedder(path: Path) -> PreTrainedModel:
    """As Qwen3-Embedding is published: the base model, whose tokenizer puts an end token."""
    whole = make_checkpoint(path, "qwen3", tie_word_embeddings=False, max_position_embeddings=4096)
    assert isinstance(whole, Qwen3ForCausalLM)
    whole.model.save_pretrained(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, folder) in enumerate(kinds.items())
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    reference: PreTrainedModel = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    return reference


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    folder = tmp_path_factory.mktemp("embedder")
    reference = make_embedder(folder / "model")
    store = TenantStore(folder / "tenants", create=True)
    store.set_tier("small", None, {"requests_per_minute": 2})
    keys = {}
    for tenant, tier in (("a", "standard"), ("counted", "standard"), ("limited", "small")):
        store.set_tenant(tenant, tier=tier)
        keys[tenant] = store.create_key(tenant).key
    store.close()
    arguments = ["--prefill", "2", "--decode", "1", "--tenants-file", str(folder / "tenants"), "--ollama"]
    arguments += ["--batch-file", str(folder / "batches"), "--prefill-max-batch-tokens", str(CHUNK)]
    with running(folder / "model", folder, *arguments, "--kv-cache-gib", "0.1", *NEVER_DEAD) as cluster:
        embedder = Embedder(cluster, folder, reference, keys)
        yield embedder
        for client in embedder.clients.values():
            client.close()


def same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), expected, atol=1e-5)


@pytest.mark.parametrize("more", [{}, {"encoding_format": "float"}])
def test_openais_client(embedder: Embedder, more: Any) -> None:
    """By default it asks for base64. The long text is computed in chunks; the second time it is cached."""
    client = embedder.client()
    answer = client.embeddings.create(model=MODEL_NAME, input=TEXTS, **more)
    for text, each in zip(TEXTS, answer.data, strict=True):
        same(each.embedding, embedder.expected(text))
    assert answer.usage.prompt_tokens == sum(len(text) + 1 for text in TEXTS)
    embedder.cluster.wait_reported()  # so that the worker that has it cached gets it
    again = client.embeddings.create(model=MODEL_NAME, input=TEXTS[2] + "!", dimensions=8, **more)
    same(again.data[0].embedding, embedder.expected(TEXTS[2] + "!", 8))
    extra: Any = again.usage.model_extra
    assert extra["prompt_tokens_details"]["cached_tokens"] > CHUNK


def test_ollamas_client(embedder: Embedder) -> None:
    headers = {"authorization": f"Bearer {embedder.keys['a']}"}
    with ollama.Client(embedder.cluster.url, headers=headers, verify=False) as client:
        answer = client.embed(model=MODEL_NAME, input=TEXTS)
        for text, found in zip(TEXTS, answer.embeddings, strict=True):
            same(found, embedder.expected(text))
        same(client.embeddings(model=MODEL_NAME, prompt=TEXTS[1]).embedding, embedder.expected(TEXTS[1]))


def test_no_decode_worker_hears_of_it_and_nothing_is_completed(embedder: Embedder) -> None:
    before = [w["counters"] for w in embedder.cluster.workers("decode")]
    embedder.client().embeddings.create(model=MODEL_NAME, input=TEXTS)
    embedder.cluster.wait_at_rest()
    embedder.cluster.wait_reported()
    after = [w["counters"] for w in embedder.cluster.workers("decode")]
    assert [c["output_tokens"] for c in after] == [c["output_tokens"] for c in before]
    with pytest.raises(openai.BadRequestError, match="has no head"):
        embedder.client().completions.create(model=MODEL_NAME, prompt="the")


def test_a_killed_worker_loses_no_embedding(embedder: Embedder) -> None:
    """It stands still while it is given its share, and then dies."""
    cluster = embedder.cluster
    pid = cluster.workers("prefill")[0]["pid"]
    texts = [f"{i} " + TEXTS[2] for i in range(12)]
    os.kill(pid, signal.SIGSTOP)

    def ask(text: str) -> Any:
        return embedder.client().embeddings.create(model=MODEL_NAME, input=text).data[0].embedding

    def has_work() -> bool:
        return any(w["pid"] == pid and w["dispatches"] for w in cluster.workers("prefill"))

    with ThreadPoolExecutor(len(texts)) as pool:
        asked = [pool.submit(ask, text) for text in texts]
        wait_for("it is given work", has_work)
        os.kill(pid, signal.SIGKILL)
        for text, each in zip(texts, asked, strict=True):
            same(each.result(), embedder.expected(text))
    cluster.wait_whole(2, 1)
    cluster.wait_at_rest()


def test_a_tenants_limits_hold(embedder: Embedder) -> None:
    client, statuses = embedder.client("limited"), []
    for _ in range(4):
        answer = client.embeddings.with_raw_response
        try:
            statuses.append(answer.create(model=MODEL_NAME, input="the fox").status_code)
        except openai.RateLimitError as error:
            statuses.append(error.status_code)
    assert statuses[0] == 200
    assert statuses[-1] == 429


def test_every_input_is_metered(embedder: Embedder) -> None:
    answer = embedder.client("counted").embeddings.create(model=MODEL_NAME, input=TEXTS)
    wait_for("its record", lambda: embedder.used("counted") is not None)
    used = embedder.used("counted")
    assert (used["requests"], used["prompt_tokens"], used["completion_tokens"]) == (
        1,
        answer.usage.prompt_tokens,
        0,
    )


def test_a_batch(embedder: Embedder) -> None:
    client, url = embedder.client(), "/v1/embeddings"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": {"model": MODEL_NAME, "input": text}}
        for i, text in enumerate(TEXTS)
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    assert batch.output_file_id is not None
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    for line in found:
        body = line["response"]["body"]
        same(body["data"][0]["embedding"], embedder.expected(TEXTS[int(line["custom_id"])]))
    assert len(found) == len(TEXTS)
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (sum(len(t) + 1 for t in TEXTS), 0)
