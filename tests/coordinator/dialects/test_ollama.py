"""Ollama's API through its own client: streamed and whole, tools, formats, thoughts, options, errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import httpx
import ollama
import orjson
import pytest
from pydantic import BaseModel
from support.http_fakes import ANSWER, CALL, CHAT_TEMPLATE, CITY, MAX_MODEL_LEN, FakeDispatcher

from splitserve.coordinator.dialects.ollama import OllamaAnswer
from splitserve.coordinator.http.limits import LARGE_BODY_BYTES, HttpLimits
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text.served_model import ServedModel

HELLO: Any = [{"role": "user", "content": "Hi!"}]
ASKED: Any = {"model": "tiny", "messages": HELLO, "options": {"temperature": 0}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    city: str


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, limits: HttpLimits
) -> AsyncIterator[HttpServer]:
    server = HttpServer(HttpApp(dispatcher, model, AppParts(limits, dispatcher.system, ollama=True)))
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert server.app.metrics.num_open == 0


@pytest.fixture
async def llama(server: HttpServer) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(f"http://127.0.0.1:{server.port}", verify=False, timeout=60) as client:
        yield client


def answer_with(dispatcher: FakeDispatcher, model: ServedModel, text: str) -> None:
    ids = model.tokenizer.fast.encode(text, add_special_tokens=False).ids
    dispatcher.script = lambda request: ids


def prompt_of(dispatcher: FakeDispatcher, model: ServedModel) -> str:
    prompt: str = model.tokenizer.fast.decode(
        dispatcher.requests[-1].prompt_token_ids, skip_special_tokens=False
    )
    return prompt


async def test_a_stream_adds_up_to_the_whole(llama: ollama.AsyncClient, dispatcher: FakeDispatcher) -> None:
    whole = await llama.chat(**ASKED)
    assert (whole.message.content, whole.done, whole.done_reason) == (ANSWER, True, "stop")
    parts = [part async for part in await llama.chat(**ASKED, stream=True)]
    assert len(parts) > 5
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.done_reason, last.message.content) == ("stop", "")
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert last.prompt_eval_count == len(dispatcher.requests[-1].prompt_token_ids)
    durations = last.total_duration, last.prompt_eval_duration, last.eval_duration
    assert all(isinstance(each, int) and each > 0 for each in durations)
    assert durations[0] > durations[1] + durations[2]
    assert datetime.fromisoformat(last.created_at or "").tzinfo is not None


async def test_each_line_of_a_stream_is_json(http: httpx.AsyncClient) -> None:
    answer = await http.post("/api/chat", json=ASKED)  # streams by default
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    assert all(orjson.loads(line)["model"] == "tiny" for line in answer.text.splitlines())


async def test_a_tool_is_called_and_its_result_comes_back(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    answer_with(dispatcher, model, f"Let me look.{CALL}{CALL}")
    parts = [part async for part in await llama.chat(**ASKED, tools=[WEATHER], stream=True)]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Paris"})
    ] * 2
    assert parts[-1].done_reason == "stop"
    whole = await llama.chat(**ASKED, tools=[WEATHER])
    assert whole.message.content == "Let me look."
    assert [call.function for call in whole.message.tool_calls or ()] == [call.function for call in calls]


@pytest.mark.parametrize("format", ["json", City.model_json_schema()], ids=["json", "schema"])
async def test_a_format_binds_the_output(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel, format: Any
) -> None:
    answer_with(dispatcher, model, CITY)
    answer = await llama.chat(**ASKED, format=format)
    assert City.model_validate_json(answer.message.content or "").city == "Paris"
    assert dispatcher.requests[-1].sampling.grammar
    text = await llama.generate("tiny", "Hi", format=format)
    assert City.model_validate_json(text.response or "").city == "Paris"
    assert dispatcher.requests[-1].sampling.grammar


async def test_options_hold(llama: ollama.AsyncClient, dispatcher: FakeDispatcher) -> None:
    options = {
        "num_predict": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 11,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "num_ctx": 4096, "num_thread": 2, "repeat_last_n": -1,
    }  # fmt: skip
    answer = await llama.chat("tiny", HELLO, options=options, keep_alive="5m")
    assert (answer.done_reason, answer.eval_count) == ("length", 3)
    sampling = dispatcher.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (3, 0.5, 7, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 11, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    for stop in ("\nEND", ["never", "\nEND"]):
        answer = await llama.chat("tiny", HELLO, options={"temperature": 0, "stop": stop})
        assert answer.message.content == ANSWER.partition("\nEND")[0]


async def test_any_number_of_new_tokens_may_be_allowed(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    for most in (-1, -2, 0, 1_000_000):
        await llama.chat("tiny", HELLO, options={"num_predict": most})
        request = dispatcher.requests[-1]
        assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)


async def test_a_prompt_without_messages(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    whole = await llama.generate("tiny:latest", "Hi!", system="Be brief.", options={"temperature": 0})
    assert (whole.model, whole.response, whole.done_reason) == ("tiny:latest", ANSWER, "stop")
    assert prompt_of(dispatcher, model) == "<|bos|><|system|>Be brief.<|end|><|user|>Hi!<|end|><|assistant|>"
    stream = await llama.generate("tiny", "Hi!", options={"temperature": 0}, stream=True)
    assert "".join([part.response or "" async for part in stream]) == ANSWER


async def test_a_raw_prompt_is_not_put_into_the_template(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    answer = await llama.generate("tiny", "def join(", raw=True, options={"temperature": 0})
    assert answer.response == ANSWER
    assert prompt_of(dispatcher, model) == "<|bos|>def join("
    request = dispatcher.requests[-1]
    assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)
    await llama.generate("tiny", "def join(", raw=True, options={"num_predict": 2})
    assert dispatcher.requests[-1].sampling.max_tokens == 2


async def test_log_probabilities(llama: ollama.AsyncClient) -> None:
    answer = await llama.chat(**ASKED, logprobs=True, top_logprobs=2)
    assert answer.eval_count is not None
    assert answer.logprobs is not None
    assert len(answer.logprobs) == answer.eval_count
    assert len(answer.logprobs[0].top_logprobs or ()) == 2
    stream = await llama.chat(**ASKED, logprobs=True, stream=True)
    assert sum([len(part.logprobs or ()) async for part in stream]) == answer.eval_count


async def test_without_a_prompt_the_model_is_only_loaded(
    llama: ollama.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    assert (await llama.generate("tiny")).done_reason == "load"
    assert (await llama.chat("tiny", [])).done_reason == "load"
    assert not dispatcher.requests


async def test_the_model_is_listed_and_shown(
    llama: ollama.AsyncClient, http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    card, *others = (await llama.list()).models
    assert [other.model for other in others] == ["tiny-1", "gpt-4o"]
    assert (card.model, card.details and card.details.format) == ("tiny", "safetensors")
    loaded = (await llama.ps()).models[0]
    assert (loaded.model, loaded.context_length, loaded.digest) == ("tiny", MAX_MODEL_LEN, card.digest)
    dispatcher.is_ready = False
    assert not (await llama.ps()).models
    shown = await llama.show("tiny")
    assert (shown.template, shown.capabilities) == (CHAT_TEMPLATE, ["completion", "tools", "embedding"])
    assert any(name.endswith(".context_length") for name in shown.modelinfo or ())
    assert "top_k 20" in (shown.parameters or "")
    version = (await http.get("/api/version")).json()["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)  # clients compare it


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
        ({"images": ["aGk="]}, "images"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"temperatur": 0.5}}, "options.temperatur"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"truncate": True}, "truncate"),
        ({"format": "yaml"}, "format"),
        ({"format": {"type": "object", "properties": {"a": {"type": "nothing"}}}}, "format"),
        ({"model": "llama3.2"}, "llama3.2"),
    ],
)
async def test_a_refusal_is_one_sentence_that_names_the_field(
    http: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    answer = await http.post("/api/chat", json={**ASKED, **fields})
    assert (answer.status_code, set(answer.json())) == (404 if "model" in fields else 400, {"error"})
    assert named in answer.json()["error"]


async def test_errors_are_the_clients_own(llama: ollama.AsyncClient, dispatcher: FakeDispatcher) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        await llama.chat("other", HELLO)
    assert error.value.status_code == 404
    failed = Ended(error="failed", message="a worker died", num_dispatches=1)
    dispatcher.fail_after = (2, failed)
    with pytest.raises(ollama.ResponseError, match="a worker died"):
        async for _ in await llama.chat(**ASKED, stream=True):
            pass


async def test_a_client_that_goes_cancels_its_request(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    endless = {**ASKED, "options": {"temperature": 0, "num_predict": 2000}}
    dispatcher.step_s = 0.01
    async with http.stream("POST", "/api/chat", json=endless) as answer:
        await anext(answer.aiter_lines())
    await dispatcher.until(lambda: bool(dispatcher.cancelled))


async def test_silence_adds_no_line(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalls(request: Request) -> tuple[int, Ended] | None:
        return (3, Ended(error="failed", message="no more", num_dispatches=1))

    monkeypatch.setattr(dispatcher, "fails_after", stalls)
    lines = (await http.post("/api/chat", json=ASKED)).text.splitlines()
    assert all(lines)
    assert orjson.loads(lines[-1]) == {"error": "no more"}
    assert list(OllamaAnswer("tiny", generates=False).pause()) == []


async def test_a_large_body_is_read_aside(http: httpx.AsyncClient) -> None:
    large = [{"role": "user", "content": "a" * (LARGE_BODY_BYTES + 1)}]
    answer = await http.post("/api/chat", json={**ASKED, "messages": large})
    assert (answer.status_code, "context" in answer.json()["error"]) == (400, True)


async def test_it_needs_the_option_and_a_key(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Any
) -> None:
    without = HttpServer(HttpApp(dispatcher, model))
    store = TenantStore(tmp_path / "tenants.db", create=True)
    store.set_tenant("acme", tier="premium")
    key = store.create_key("acme").key
    tenancy = Tenancy(KeyDirectory(tmp_path / "tenants.db"))
    keyed = HttpServer(HttpApp(dispatcher, model, AppParts(ollama=True, tenancy=tenancy)))
    await asyncio.gather(without.start(), keyed.start())
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"http://127.0.0.1:{without.port}/api/tags")
        assert answer.status_code == 404
        assert "--ollama" in answer.json()["error"]
        url = f"http://127.0.0.1:{keyed.port}/api/tags"
        refused = await http.get(url)
        assert (refused.status_code, set(refused.json())) == (401, {"error"})
        http.headers["authorization"] = f"Bearer {key}"
        assert (await http.get(url)).status_code == 200
        chat = await http.post(f"http://127.0.0.1:{keyed.port}/api/chat", json={**ASKED, "stream": False})
        assert (chat.status_code, chat.json()["done"]) == (200, True)
    (request,) = dispatcher.requests
    assert (request.tenant, request.priority_class) == ("acme", "premium")
    await asyncio.gather(without.stop(0), keyed.stop(0))
