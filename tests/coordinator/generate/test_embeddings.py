"""/v1/embeddings as OpenAI's client knows it: inputs, forms, counts; and nonsense gets a sentence."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from support.http_fakes import ADMIN_KEY, MAX_MODEL_LEN, FakeDispatcher, hidden_state

from splitserve.coordinator.generate.plan import MAX_READ
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import LARGE_BODY_BYTES, HttpLimits
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.embeddings import EmbeddingRules
from splitserve.coordinator.text.served_model import ServedModel

PATH = "/v1/embeddings"


@pytest.fixture
def rules() -> EmbeddingRules:
    return EmbeddingRules(size=4)


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, limits: HttpLimits, rules: EmbeddingRules
) -> AsyncIterator[HttpServer]:
    served = replace(model, embeddings=rules)
    server = HttpServer(
        HttpApp(dispatcher, served, AppParts(limits, dispatcher.system, Operators(ADMIN_KEY)))
    )
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert server.app.metrics.num_open == 0


def vector(request: Request, dimensions: int = 4) -> Any:
    state = np.frombuffer(hidden_state(request), np.float32)[:dimensions]
    return pytest.approx(state / np.linalg.norm(state), rel=1e-6)


async def embed(client: AsyncOpenAI, input: Any, **more: Any) -> Any:
    return await client.embeddings.create(model="tiny", input=input, **more)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_a_text(client: AsyncOpenAI, dispatcher: FakeDispatcher, encoding: Any) -> None:
    """By default the client asks for base64, and decodes it."""
    answer = await embed(client, "the quick brown fox", **encoding)
    (request,) = dispatcher.requests
    assert (request.embeds, request.sampling.max_tokens) == (True, 0)
    (found,) = answer.data
    given = found.embedding
    if encoding.get("encoding_format") == "base64":
        given = np.frombuffer(b64decode(given), "<f4").tolist()
    assert given == vector(request)
    assert (answer.object, found.object, found.index, answer.model) == ("list", "embedding", 0, "tiny")
    count = len(request.prompt_token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert answer.usage.model_extra["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_the_tokenizers_own_tokens_are_added(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    await embed(client, "fox")
    await embed(client, "fox", extra_body={"add_special_tokens": False})
    await embed(client, [7, 8])
    plain = model.tokenizer.fast.encode("fox", add_special_tokens=False).ids
    assert [list(r.prompt_token_ids) for r in dispatcher.requests] == [[0, *plain], plain, [7, 8]]


@pytest.mark.parametrize("rules", [EmbeddingRules(size=4, end=1)])
async def test_the_end_token(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    await embed(client, "fox")
    assert dispatcher.requests[0].prompt_token_ids[-1] == 1


@pytest.mark.parametrize("input", [["a", "b c", "d"], [[5, 6], [7], [5, 8, 9]]])
async def test_several_inputs(client: AsyncOpenAI, dispatcher: FakeDispatcher, input: Any) -> None:
    answer = await embed(client, input)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert [each.embedding for each in answer.data] == [vector(r) for r in dispatcher.requests]
    assert answer.usage.prompt_tokens == sum(len(r.prompt_token_ids) for r in dispatcher.requests)


async def test_two_thousand_inputs_and_a_large_body(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    answer = await embed(client, [[i % 500, 7] for i in range(2048)])
    assert len(answer.data) == 2048
    assert answer.data[2047].embedding == vector(dispatcher.requests[2047])
    text = "the quick brown fox " * (LARGE_BODY_BYTES // 20 + 1)
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    answer = await embed(client, pieces)
    assert [each.embedding for each in answer.data] == [vector(r) for r in dispatcher.requests[2048:]]


async def test_many_inputs_leave_room_in_the_queue(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    """2,048 at a time were more than the queue takes, on an idle cluster too."""
    most = 0

    def counted(_: Request) -> None:
        nonlocal most
        most = max(most, len(dispatcher.running) + 1)

    dispatcher.refuse = counted
    answer = await http.post(PATH, json={"input": [[7]] * 1000})
    assert len(answer.json()["data"]) == 1000
    assert most == MAX_READ
    dispatcher.hold = True
    asking = asyncio.ensure_future(http.post(PATH, json={"input": [[7]] * 1000}))
    await dispatcher.until(lambda: len(dispatcher.running) == MAX_READ)
    asking.cancel()
    await dispatcher.until(lambda: len(dispatcher.cancelled) == MAX_READ)
    assert len(dispatcher.requests) == 1000 + MAX_READ


@pytest.mark.parametrize("rules", [EmbeddingRules(size=4, longest=3)])
async def test_the_longest_text_of_a_model(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    await embed(client, [[5, 6, 7], [5]])
    for text in ([5, 6, 7, 8], "the quick brown fox jumps over it " * 100):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 3 tokens"):
            await embed(client, text)
    await embed(client, [[5, 6, 7, 8]], extra_body={"truncate_prompt_tokens": -1})
    assert [list(r.prompt_token_ids) for r in dispatcher.requests] == [[5, 6, 7], [5], [5, 6, 7]]


async def test_dimensions_are_cut_and_normalised_again(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    answer = await embed(client, "fox", dimensions=2)
    assert answer.data[0].embedding == vector(dispatcher.requests[0], 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: "),
        ({"input": ""}, "input: must not be empty"),
        ({"input": []}, "input: must not be empty"),
        ({"input": ["a", ""]}, "input: must not be empty"),
        ({"input": [[1], []]}, "input: must not be empty"),
        ({"input": ["a", [1]]}, "input: must not mix"),
        ({"input": {"text": "a"}}, "input: must be a string"),
        ({"input": [1.5]}, "input: must not mix"),
        ({"input": [[True]]}, "input: token ids must be integers"),
        ({"input": [-1]}, "input: token ids must not be negative"),
        ({"input": [512]}, "input: token id 512 is outside the vocabulary of 512 tokens"),
        ({"input": ["a"] * 2049}, "input: has 2049 prompts; at most 2048 are allowed"),
        ({"input": [1] * MAX_MODEL_LEN}, "maximum context length is 2047 tokens, but your prompt has 2048"),
        ({"input": "fox " * MAX_MODEL_LEN}, "maximum context length is 2047 tokens"),
        ({"input": "a", "dimensions": 0}, "dimensions: must be at least 1"),
        ({"input": "a", "dimensions": 5}, "dimensions: is 5; the model's vectors have 4"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: "),
        ({"input": "a", "stream": True}, "stream: must be null or false"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens: "),
        ({"input": "a", "user": 3}, "user: "),
    ],
)
async def test_nonsense_gets_a_sentence(http: httpx.AsyncClient, body: Any, message: str) -> None:
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_other_ways_to_ask(http: httpx.AsyncClient) -> None:
    assert (await http.get(PATH)).status_code == 405
    assert (await http.post(PATH, json={"input": "a", "model": "other"})).status_code == 404


@pytest.mark.parametrize("keep", [1, 3, -1])
@pytest.mark.parametrize("rules", [EmbeddingRules(size=4, end=1)])
async def test_a_text_that_is_cut_keeps_its_end_token(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, keep: int
) -> None:
    text = "the quick brown fox " * 3000
    await embed(client, ["the", text], extra_body={"truncate_prompt_tokens": keep})
    ids = list(dispatcher.requests[1].prompt_token_ids)
    assert len(ids) == (keep if keep > 0 else MAX_MODEL_LEN - 1)
    assert ids[0] == 0, "its beginning"
    assert ids[-1] == (1 if keep != 1 else 0)


@pytest.mark.parametrize("rules", [EmbeddingRules(size=4, refusal="it pools by mean_tokens, and so on")])
async def test_a_pooling_that_is_not_built(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has no embeddings here: it pools by mean_tokens"):
        await embed(client, "fox")


@pytest.mark.parametrize("rules", [EmbeddingRules(size=4, alone=True)])
async def test_a_model_without_head_completes_nothing(client: AsyncOpenAI) -> None:
    assert len((await embed(client, "fox")).data) == 1
    with pytest.raises(openai.BadRequestError, match="has no head"):
        await client.completions.create(model="tiny", prompt="fox")
    with pytest.raises(openai.BadRequestError, match="has no head"):
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])


async def test_their_memory_is_bounded(http: httpx.AsyncClient, server: HttpServer) -> None:
    """Many short texts have long answers."""
    server.app.overload.take("prompt_bytes", server.app.overload.limits["prompt_bytes"] - 400)
    assert (await http.post(PATH, json={"input": [[1]] * 3})).status_code == 200
    answer = await http.post(PATH, json={"input": [[1]] * 6})
    assert answer.status_code == 429
    assert "take as much memory as they may" in answer.json()["error"]["message"]


async def test_a_failure_of_one_is_the_answers(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    dispatcher.fail_after = 0, Ended(error="deadline", message="too late")
    with pytest.raises(openai.APIStatusError) as caught:
        await embed(client, ["a", "b"])
    assert caught.value.status_code == 504


async def test_a_client_that_leaves_cancels_all(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = True
    asking = asyncio.ensure_future(http.post(PATH, json={"input": ["a", "b", "c"]}))
    await dispatcher.until(lambda: len(dispatcher.running) == 3)
    asking.cancel()
    await dispatcher.until(lambda: len(dispatcher.cancelled) == 3)


async def test_they_are_counted_by_their_endpoint(http: httpx.AsyncClient) -> None:
    await http.post(PATH, json={"input": "a"})
    metrics = (await http.get("/metrics")).text
    assert 'endpoint="/v1/embeddings",model_name="tiny",status="200"} 1.0' in metrics
