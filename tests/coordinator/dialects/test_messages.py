"""/v1/messages through Anthropic's own client: streamed and whole, tools, thoughts, errors, a client that
goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from support.http_fakes import ANSWER, CALL, FakeDispatcher

from splitserve.coordinator.dialects.messages import MessageAnswer
from splitserve.coordinator.dialects.messages_body import MessagesRequest
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.text.served_model import ServedModel

if TYPE_CHECKING:  # it takes 3 s to import, in every process that collects this file
    from anthropic import AsyncAnthropic

HELLO: Any = [{"role": "user", "content": "Hi!"}]
ASKED: Any = {"model": "tiny", "max_tokens": 300, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
async def claude(server: HttpServer) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    plain = httpx2.AsyncClient(verify=False, timeout=60)
    url = f"http://127.0.0.1:{server.port}"
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
        yield client


def prepare_answer(dispatcher: FakeDispatcher, model: ServedModel, text: str) -> None:
    ids = model.tokenizer.fast.encode(text, add_special_tokens=False).ids
    dispatcher.script = lambda request: ids


def prompt_of(dispatcher: FakeDispatcher, model: ServedModel) -> str:
    prompt: str = model.tokenizer.fast.decode(
        dispatcher.requests[-1].prompt_token_ids, skip_special_tokens=False
    )
    return prompt


async def test_a_whole_message(
    claude: AsyncAnthropic, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    message = await claude.messages.create(
        messages=HELLO, system=[{"type": "text", "text": "Be brief."}], **ASKED
    )
    (block,) = message.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert prompt_of(dispatcher, model) == "<|bos|><|system|>Be brief.<|end|><|user|>Hi!<|end|><|assistant|>"
    usage, num_prompt = message.usage, len(dispatcher.requests[0].prompt_token_ids)
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_prompt - 3, 3)
    assert usage.output_tokens == len(model.tokenizer.fast.encode(ANSWER, add_special_tokens=False).ids) + 1


async def test_a_stream_adds_up_to_the_whole(claude: AsyncAnthropic) -> None:
    whole = await claude.messages.create(messages=HELLO, **ASKED)
    async with claude.messages.stream(messages=HELLO, **ASKED) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert kinds[0] == "message_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_a_tool_is_called_and_its_result_comes_back(
    claude: AsyncAnthropic, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    prepare_answer(dispatcher, model, f"Let me look.{CALL}")
    async with claude.messages.stream(messages=HELLO, tools=[WEATHER], **ASKED) as stream:
        message = await stream.get_final_message()
    text, call = message.content
    assert (text.type, call.type, message.stop_reason) == ("text", "tool_use", "tool_use")
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Paris"})


def test_calls_results_and_thoughts_of_earlier_turns_become_a_chats() -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "Rain.", "is_error": True}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        {"role": "assistant", "content": "It"},
    ]
    chat = MessagesRequest.model_validate({"max_tokens": 9, "messages": turns}).for_chat()
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert chat["messages"] == [
        {"role": "user", "content": "Hi!"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "a", "content": "Error: Rain."},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "It"},
    ]
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)


def test_a_thought_is_a_block_before_the_text() -> None:
    answer = MessageAnswer("tiny")
    for delta in ({"reasoning_content": "H"}, {"reasoning_content": "m."}, {"content": "Yes."}):
        list(answer.feed({"choices": [{"delta": delta, "finish_reason": None}]}))
    list(answer.finish())
    assert answer.whole()["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]


async def test_a_tool_that_must_be_called_binds_the_output(
    claude: AsyncAnthropic, dispatcher: FakeDispatcher
) -> None:
    await claude.messages.create(messages=HELLO, tools=[WEATHER], tool_choice={"type": "any"}, **ASKED)
    assert dispatcher.requests[-1].sampling.grammar


async def test_a_stop_sequence_is_named(claude: AsyncAnthropic) -> None:
    message = await claude.messages.create(messages=HELLO, stop_sequences=["never", "\nEND"], **ASKED)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\nEND")
    assert message.content[0].type == "text"
    assert message.content[0].text == ANSWER.partition("\nEND")[0]


async def test_the_limit_of_tokens_is_named(claude: AsyncAnthropic) -> None:
    message = await claude.messages.create(**{**ASKED, "max_tokens": 3}, messages=HELLO)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


async def test_tokens_are_counted_without_running_anything(
    claude: AsyncAnthropic, dispatcher: FakeDispatcher
) -> None:
    counted = await claude.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.")
    assert not dispatcher.requests
    await claude.messages.create(messages=HELLO, system="Be brief.", **ASKED)
    assert counted.input_tokens == len(dispatcher.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "?"}]}]}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"mcp_servers": [{"url": "http://localhost"}]}, "mcp_servers"),
    ],
)
async def test_what_is_wrong_is_named_in_anthropics_shape(
    claude: AsyncAnthropic, changed: dict[str, Any], named: str
) -> None:
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError) as refused:
        await claude.messages.create(**{"messages": HELLO, **ASKED, "extra_body": changed})
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]


async def test_a_model_that_is_not_here(claude: AsyncAnthropic) -> None:
    from anthropic import NotFoundError

    with pytest.raises(NotFoundError, match="tiny"):
        await claude.messages.create(**{**ASKED, "model": "claude"}, messages=HELLO)


async def test_a_refusal_of_the_lifecycle_keeps_its_status(
    claude: AsyncAnthropic, dispatcher: FakeDispatcher
) -> None:
    from anthropic import RateLimitError

    dispatcher.refuse = lambda request: Ended(error="overloaded", retry_after_s=7)
    with pytest.raises(RateLimitError) as refused:
        await claude.messages.create(messages=HELLO, **ASKED)
    assert refused.value.response.headers["retry-after"] == "7"


async def test_a_stream_that_breaks_off_ends_with_an_error(
    claude: AsyncAnthropic, dispatcher: FakeDispatcher
) -> None:
    from anthropic import APIStatusError

    dispatcher.fail_after = (3, Ended(error="failed", message="The worker is gone."))
    with pytest.raises(APIStatusError, match="The worker is gone"):
        async with claude.messages.stream(messages=HELLO, **ASKED) as stream:
            await stream.get_final_message()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_goes_ends_its_request(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, streamed: bool
) -> None:
    dispatcher.step_s, endless = 0.02, dispatcher.script

    def script(request: Request) -> list[int]:
        return endless(request) * 100

    dispatcher.script = script
    body = {"model": "tiny", "max_tokens": 300, "temperature": 0, "messages": HELLO, "stream": streamed}
    asking = asyncio.ensure_future(http.post("/v1/messages", json=body))
    while not dispatcher.running:
        await asyncio.sleep(0.01)
    asking.cancel()
    async with asyncio.timeout(60):
        while not dispatcher.cancelled:
            await asyncio.sleep(0.01)
