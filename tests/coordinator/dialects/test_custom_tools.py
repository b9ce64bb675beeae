"""Custom tools of /v1/responses: their input is text, of any form or of a regex."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer
from openai import AsyncOpenAI
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.dialects.responses_items import items_of, messages_of
from splitserve.coordinator.text.served_model import ServedModel

ASKED: Any = {"model": "tiny", "input": "Hi!", "temperature": 0}


async def test_a_custom_tool_is_called_with_text(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    date = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}"}
    tools: Any = [{"type": "custom", "name": "day", "format": date}, {"type": "custom", "name": "sh"}]
    call = '<tool_call>\n{"name": "%s", "arguments": {"input": "%s"}}\n</tool_call>'
    answer = call % ("sh", 'echo \\"a\\"\\n')
    ids = model.tokenizer.fast.encode(answer, add_special_tokens=False).ids
    dispatcher.script = lambda request: ids
    async with client.responses.stream(tools=tools, **ASKED) as stream:
        kinds = [event.type async for event in stream]
        (item,) = (await stream.get_final_response()).output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("sh", 'echo "a"\n')
    assert kinds[-4:-2] == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    assert follows(dispatcher, model, call % ("day", "17"), call % ("day", "x")) == [True, False]
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "a"}
    forced: Any = {"tools": tools, "tool_choice": {"type": "custom", "name": "day"}}
    await client.responses.create(**ASKED, **forced)
    assert follows(dispatcher, model, call % ("day", "17"), call % ("sh", "17"), "No.") == [
        True,
        False,
        False,
    ]
    assert messages_of(items_of([item.model_dump(), output]))[1] == {
        "role": "tool", "tool_call_id": item.call_id, "content": "a"
    }  # fmt: skip
    assert messages_of(items_of([item.model_dump()]))[0]["tool_calls"][0]["function"] == {
        "name": "sh", "arguments": '{"input": "echo \\"a\\"\\n"}'
    }  # fmt: skip


async def test_input_that_is_no_text_stays_json(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    """Half a surrogate pair: the whole answer was lost."""
    answer = '<tool_call>\n{"name": "sh", "arguments": {"input": "\\ud83d"}}\n</tool_call>'
    ids = model.tokenizer.fast.encode(answer, add_special_tokens=False).ids
    dispatcher.script = lambda request: ids
    tools: Any = [{"type": "custom", "name": "sh"}]
    (item,) = (await client.responses.create(tools=tools, **ASKED)).output
    assert (item.type, item.input) == ("custom_tool_call", '{"input": "\\ud83d"}')


def follows(dispatcher: FakeDispatcher, model: ServedModel, *texts: str) -> list[bool]:
    """Whether each text is a whole output under the last request's grammar."""
    tokenizer = LLTokenizer(model.tokenizer.fast.to_str(), n_vocab=model.vocab_size, eos_token=[1])
    compiled = LLMatcher(tokenizer, dispatcher.requests[-1].sampling.grammar.decode(), log_level=0)
    found = []
    for text in texts:
        matcher, ids = compiled.deep_copy(), model.tokenizer.fast.encode(text, add_special_tokens=False).ids
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found
