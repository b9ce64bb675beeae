"""Tokenize, detokenize, health, readiness, metrics, state."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.http_fakes import FakeDispatcher

from splitserve import __version__
from splitserve.coordinator.metrics import metrics
from splitserve.coordinator.metrics.metrics import PENDING, BatchedHistogram
from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.text.served_model import ServedModel


async def test_tokenize_and_detokenize(http: httpx.AsyncClient, model: ServedModel) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "quick 世", "return_token_strs": True})).json()
    ids = model.tokenizer.fast.encode("quick 世").ids
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"]) == (len(ids), 2048)
    assert answer["token_strs"][0] == "<|bos|>"
    bare = (await http.post("/tokenize", json={"prompt": "quick 世", "add_special_tokens": False})).json()
    assert bare["tokens"] == ids[1:]
    assert (await http.post("/detokenize", json={"tokens": ids[1:]})).json() == {"prompt": "quick 世"}
    chat = (
        await http.post(
            "/tokenize", json={"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
        )
    ).json()
    assert model.tokenizer.fast.decode(chat["tokens"], skip_special_tokens=False) == "<|bos|><|user|>a<|end|>"
    for bad in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 1}):
        assert (await http.post("/tokenize", json=bad)).status_code == 400
    for tokens in ([512], [-1], "a", [1 << 80]):
        assert (await http.post("/detokenize", json={"tokens": tokens})).status_code == 400


async def test_health_and_readiness(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    dispatcher.is_ready = False
    response = await http.get("/ready")
    assert response.status_code == 503
    assert "prefill, handoff and decode" in response.json()["error"]["message"]
    assert (await http.get("/health")).status_code == 200


async def test_what_clients_of_vllm_ask_for(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()
    assert (await http.get("/version")).json() == {"version": __version__}
    for method in ("GET", "POST"):
        answer = await http.request(method, "/ping")
        assert (answer.status_code, answer.content) == (200, b"")


async def test_debug_state(http: httpx.AsyncClient) -> None:
    state = (await http.get("/debug/state")).json()
    assert state["workers"][0]["worker_id"] == "prefill-0"
    assert state["http"] == {"open_requests": 0}


def samples(families: Iterable[Metric]) -> dict[str, float]:
    return {
        s.name
        + "".join(f"|{value}" for key, value in sorted(s.labels.items()) if key != "model_name"): s.value
        for f in families
        for s in f.samples
    }


async def test_metrics(http: httpx.AsyncClient, server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MIN_SCRAPE_INTERVAL_S", 1e9)
    for _ in range(3):
        await http.post("/v1/completions", json={"prompt": "quick", "max_tokens": 5, "stream": True})
    await http.post("/v1/completions", json={"prompt": ""})
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = samples(text_string_to_metric_families(response.text))
    assert found["splitserve_requests_total|/v1/completions|200"] == 3
    assert found["splitserve_requests_total|/v1/completions|400"] == 1
    assert found["splitserve_sequences_total|length"] == 3
    assert found["splitserve_generation_tokens_total"] == 15
    assert found["splitserve_prompt_tokens_cached_total"] == 9
    for name in (
        "time_to_first_token",
        "time_per_output_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_decode_time",
    ):
        assert found[f"splitserve_{name}_seconds_count"] == 3
    assert 0 < found["splitserve_inter_token_latency_seconds_count"] <= 12
    assert 0 < found["splitserve_request_prefill_time_seconds_sum"] < 60
    assert found["splitserve_request_prefill_time_seconds_bucket|640.0"] == 3
    assert found["splitserve_kv_blocks|decode|cached|decode-0"] == 20
    assert found["splitserve_kv_cache_usage_ratio|decode|decode-0"] == 0.3
    assert found["splitserve_worker_handoff_bytes_total|decode|decode-0"] == 12345
    assert found["splitserve_recoveries_total"] == 1
    assert found["splitserve_num_requests_waiting"] == 4
    await http.post("/v1/completions", json={"prompt": ""})
    again = (await http.get("/metrics")).text
    assert again == response.text  # rendered once in this time


async def test_a_long_prompt_is_tokenized_off_the_loop(model: ServedModel) -> None:
    text = "the quick brown fox " * 20_000
    turned = threading.Event()

    def encode() -> list[list[int]]:
        assert turned.wait(60), "the loop turns meanwhile"
        return model.tokenizer.encode([text], add_special_tokens=True)

    encoding = model.tokenizer.aside(encode)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not encoding.done()
    turned.set()
    assert (await encoding)[0] == model.tokenizer.fast.encode(text).ids


def test_batched_histogram_counts_like_a_plain_one() -> None:
    histogram = BatchedHistogram("splitserve_h", "text", (1, 2, 4), {"a": "b"})
    values = [0.5, 1, 1.5, 2, 3, 5] * PENDING
    for value in values:
        histogram.observe(value)
    (family,) = histogram.collect()
    found = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    for bound in (1, 2, 4):
        assert found["splitserve_h_bucket", f"{bound}.0"] == sum(value <= bound for value in values)
    assert found["splitserve_h_count", None] == len(values)
    assert found["splitserve_h_sum", None] == sum(values)
