"""Ollama's /api/embed and /api/embeddings through its own client."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import ollama
import pytest
from support.http_fakes import MAX_MODEL_LEN, FakeDispatcher, hidden_state

from splitserve.coordinator.dialects import ollama_embed
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture
async def llama(
    dispatcher: FakeDispatcher, model: ServedModel, limits: HttpLimits
) -> AsyncIterator[ollama.AsyncClient]:
    server = HttpServer(HttpApp(dispatcher, model, AppParts(limits, dispatcher.system, ollama=True)))
    await server.start()
    async with ollama.AsyncClient(f"http://127.0.0.1:{server.port}", verify=False, timeout=60) as client:
        yield client
    await server.stop(grace_s=0)
    assert server.app.metrics.num_open == 0


def vectors(dispatcher: FakeDispatcher, dimensions: int = 4) -> Any:
    states = [np.frombuffer(hidden_state(r), np.float32)[:dimensions] for r in dispatcher.requests]
    return [pytest.approx(state / np.linalg.norm(state), rel=1e-6) for state in states]


@pytest.mark.parametrize("input", ["the fox", ["the fox", "a dog"]])
async def test_embed(llama: ollama.AsyncClient, dispatcher: FakeDispatcher, input: Any) -> None:
    answer = await llama.embed(model="tiny:latest", input=input, keep_alive="5m", options={"num_ctx": 9})
    assert answer.embeddings == vectors(dispatcher)
    assert len(answer.embeddings) == (1 if isinstance(input, str) else 2)
    assert answer.model == "tiny:latest"
    assert answer.prompt_eval_count == sum(len(r.prompt_token_ids) for r in dispatcher.requests)
    assert answer.total_duration is not None
    assert answer.total_duration > 0


async def test_a_long_answer_is_made_beside_the_event_loop(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 vectors took 2.5 s in which no stream had a token."""
    made: list[tuple[bool, bytes]] = []

    def noted(body: bytes) -> Any:
        made.append((threading.current_thread() is threading.main_thread(), body))
        return vectors_of(body)

    vectors_of = ollama_embed._vectors
    monkeypatch.setattr(ollama_embed, "_vectors", noted)
    answer = await llama.embed(model="tiny", input=[f"fox {i}" for i in range(2048)])
    assert answer.embeddings == vectors(dispatcher)
    ((on_the_loop, body),) = made
    assert not on_the_loop
    assert b'"embedding":"' in body, "no numbers of Python's are made"


async def test_dimensions(llama: ollama.AsyncClient, dispatcher: FakeDispatcher) -> None:
    answer = await llama.embed(model="tiny", input="the fox", dimensions=3)
    assert answer.embeddings == vectors(dispatcher, 3)


async def test_what_does_not_fit_is_cut_unless_that_is_forbidden(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    text = "the quick brown fox " * 1000
    await llama.embed(model="tiny", input=text)
    assert len(dispatcher.requests[0].prompt_token_ids) == MAX_MODEL_LEN - 1
    with pytest.raises(ollama.ResponseError, match="maximum context length") as caught:
        await llama.embed(model="tiny", input=text, truncate=False)
    assert caught.value.status_code == 400


async def test_the_older_endpoint(llama: ollama.AsyncClient, dispatcher: FakeDispatcher) -> None:
    answer = await llama.embeddings(model="tiny", prompt="the fox")
    assert [list(answer.embedding)] == vectors(dispatcher)


async def test_nothing_loads_the_model(llama: ollama.AsyncClient, dispatcher: FakeDispatcher) -> None:
    assert (await llama.embed(model="tiny", input="")).embeddings == []
    assert (await llama.embed(model="tiny", input=[])).embeddings == []
    assert not dispatcher.requests


async def test_errors(llama: ollama.AsyncClient) -> None:
    for input in ("", "a"):
        with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
            await llama.embed(model="other", input=input)
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="input: must not be empty"):
        await llama.embed(model="tiny", input=["a", ""])
    with pytest.raises(ollama.ResponseError, match="prompt: must not be empty"):
        await llama.embeddings(model="tiny", prompt="")


async def test_it_is_among_the_abilities(llama: ollama.AsyncClient) -> None:
    assert "embedding" in ((await llama.show("tiny")).capabilities or [])
