"""/v1/responses through OpenAI's own client: streamed and whole, continued, tools, thoughts, in the
background, stored and deleted."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from support.http_fakes import ANSWER, CALL, FakeDispatcher

from splitserve.coordinator.dialects.responses_body import ResponsesRequest
from splitserve.coordinator.dialects.responses_events import ResponseAnswer
from splitserve.coordinator.dialects.responses_items import items_of, messages_of
from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.text.served_model import ServedModel

ASKED: Any = {"model": "tiny", "input": "Hi!", "temperature": 0}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


def prepare_answer(dispatcher: FakeDispatcher, model: ServedModel, text: str) -> None:
    ids = model.tokenizer.fast.encode(text, add_special_tokens=False).ids
    dispatcher.script = lambda request: ids


def prompt_of(dispatcher: FakeDispatcher, model: ServedModel) -> str:
    prompt: str = model.tokenizer.fast.decode(
        dispatcher.requests[-1].prompt_token_ids, skip_special_tokens=False
    )
    return prompt


async def test_a_whole_response(client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel) -> None:
    response = await client.responses.create(instructions="Be brief.", **ASKED)
    assert (response.status, response.output_text) == ("completed", ANSWER)
    assert prompt_of(dispatcher, model) == "<|bos|><|system|>Be brief.<|end|><|user|>Hi!<|end|><|assistant|>"
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(dispatcher.requests[0].prompt_token_ids)
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_number_beyond_64_bits_is_refused_and_no_defect(http: httpx.AsyncClient, path: str) -> None:
    schema = {"type": "object", "properties": {"x": {"const": 1 << 80}}}
    tool = {
        "name": "f",
        **({"type": "function", "parameters": schema} if "resp" in path else {"input_schema": schema}),
    }
    text = (
        {"input": "x"}
        if "resp" in path
        else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    )
    answer = await http.post(path, json={"model": "tiny", **text, "tools": [tool]})
    assert answer.status_code == 400, answer.text
    assert "beyond 64 bits" in answer.text


async def test_a_stream_adds_up_to_the_whole(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**ASKED)
    async with client.responses.stream(**ASKED) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_conversation_goes_on_from_a_stored_response(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    prepare_answer(dispatcher, model, "One.")
    first = await client.responses.create(instructions="Be brief.", **ASKED)
    prepare_answer(dispatcher, model, "Two.")
    async with client.responses.stream(**{**ASKED, "input": "And?"}, previous_response_id=first.id) as stream:
        second = await stream.get_final_response()
    await client.responses.create(**{**ASKED, "input": "So?"}, previous_response_id=second.id)
    assert prompt_of(dispatcher, model) == (
        "<|bos|><|user|>Hi!<|end|><|assistant|>One.<|end|><|user|>And?<|end|><|assistant|>Two.<|end|>"
        "<|user|>So?<|end|><|assistant|>"
    )


async def test_items_may_be_named_in_place_of_being_sent(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    prepare_answer(dispatcher, model, "One.")
    first = await client.responses.create(**ASKED)
    turn: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "So?"}]
    await client.responses.create(**{**ASKED, "input": turn})
    assert prompt_of(dispatcher, model).endswith("<|assistant|>One.<|end|><|user|>So?<|end|><|assistant|>")
    with pytest.raises(openai.NotFoundError, match="msg_unknown"):
        await client.responses.create(**{**ASKED, "input": [{"type": "item_reference", "id": "msg_unknown"}]})


async def test_a_tool_is_called(client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel) -> None:
    prepare_answer(dispatcher, model, f"Let me look.{CALL}")
    async with client.responses.stream(tools=[WEATHER], **ASKED) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    message, call = response.output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}')
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_items_become_a_chats_messages() -> None:
    items = items_of(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi!"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "Rain."},
        ]
    )
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id, name in (("a", "weather"), ("b", "time"))
    ]
    assert messages_of(items) == [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "Rain."},
    ]


def test_a_thought_comes_back_from_clients_that_store_nothing() -> None:
    asked = ResponsesRequest.model_validate({"input": "Hi!", "include": ["reasoning.encrypted_content"]})
    answer = ResponseAnswer("resp_1", asked, "tiny")
    for delta in ({"reasoning_content": "Hm."}, {"content": "Yes."}):
        list(answer.feed({"choices": [{"delta": delta, "finish_reason": None}]}))
    list(answer.finish())
    thought, message = answer.whole()["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    del thought["content"]
    assert messages_of([thought, message]) == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    ]


async def test_a_function_of_a_namespace(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    """Codex groups functions so; the model sees both names, the client gets back what it gave."""
    prepare_answer(dispatcher, model, CALL.replace('"weather"', '"sky.weather"'))
    group = {"type": "namespace", "name": "sky", "description": "Above.", "tools": [WEATHER]}
    answer = (await http.post("/v1/responses", json={**ASKED, "tools": [group]})).json()
    (call,) = answer["output"]
    assert (call["name"], call["namespace"]) == ("weather", "sky")
    assert answer["tools"] == [group]
    assert messages_of(items_of([call]))[0]["tool_calls"][0]["function"]["name"] == "sky.weather"
    for wrong in (
        {"name": 5},
        {"tools": None},
        {"tools": [{"type": "custom"}]},
        {"tools": [{"type": "function"}]},
    ):
        refused = await http.post("/v1/responses", json={**ASKED, "tools": [{**group, **wrong}]})
        assert refused.status_code == 400, wrong


async def test_structured_output_binds_the_text(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    format_: Any = {"type": "json_schema", "name": "x", "schema": WEATHER["parameters"]}
    await client.responses.create(text={"format": format_}, **ASKED)
    assert dispatcher.requests[-1].sampling.grammar


async def test_the_limit_of_tokens_makes_it_incomplete(client: AsyncOpenAI) -> None:
    response = await client.responses.create(max_output_tokens=3, **ASKED)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_log_probabilities_are_there_where_asked_for(client: AsyncOpenAI) -> None:
    response = await client.responses.create(
        include=["message.output_text.logprobs"], top_logprobs=2, **ASKED
    )
    (part,) = response.output[0].content  # type: ignore[union-attr]
    assert part.logprobs  # type: ignore[union-attr]
    assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr,index]


async def test_the_oldest_items_make_room_where_asked_for(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    turns: Any = [{"role": "user", "content": f"{i} " + "word " * 200} for i in range(20)]
    turns.append({"role": "user", "content": "Last."})
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**{**ASKED, "input": turns})
    assert refused.value.code == "context_length_exceeded"
    await client.responses.create(**{**ASKED, "input": turns}, truncation="auto", instructions="Be brief.")
    prompt = prompt_of(dispatcher, model)
    assert prompt.startswith("<|bos|><|system|>Be brief.<|end|>")
    assert prompt.endswith("<|user|>Last.<|end|><|assistant|>")


async def test_stored_responses_are_read_listed_and_deleted(
    client: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    first, second = [await client.responses.create(**ASKED) for _ in range(2)]
    kept = await client.responses.create(**ASKED, store=False)
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    items = [item async for item in client.responses.input_items.list(first.id)]
    assert [item.type for item in items] == ["message"]
    listed = (await http.get("/v1/responses")).json()
    assert {one["id"] for one in listed["data"]} == {first.id, second.id}
    await client.responses.delete(first.id)
    for missing in (first.id, kept.id):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            await client.responses.create(**ASKED, previous_response_id=missing)


async def test_tokens_are_counted_without_running_anything(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    counted = await client.responses.input_tokens.count(model="tiny", input="Hi!", instructions="Be brief.")
    assert not dispatcher.requests
    await client.responses.create(instructions="Be brief.", **ASKED)
    assert counted.input_tokens == len(dispatcher.requests[-1].prompt_token_ids)


async def test_a_failure_ends_the_stream_with_an_event(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    dispatcher.fail_after = (3, Ended(error="failed", message="The worker is gone."))
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "The worker is gone" in last.response.error.message


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input: must be a text or a list of items"),
        ({"input": [{"type": "message", "role": "robot", "content": "?"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        ({"tools": [{"type": "code_interpreter"}]}, "runs no tool of type 'code_interpreter'"),
        ({"tools": [{"type": "custom", "name": "x", "format": LARK}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice"),
    ],
)
async def test_what_is_wrong_is_named(client: AsyncOpenAI, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**ASKED, extra_body=changed)
    assert named in f"{refused.value.param} {refused.value.message}"
