"""Functions, as OpenAI's API had them before tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from coordinator.generate.test_structured_output import follows
from openai import BadRequestError
from support.tool_answers import ARGUMENTS, ASK, HERMES, NOW, WEATHER, Answering

from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.text.chat_template import ChatTemplate
from splitserve.coordinator.text.served_model import ServedModel

FUNCTIONS: Any = {"functions": [WEATHER["function"], NOW["function"]]}


async def test_functions_as_they_were_before_tools(answering: Answering) -> None:
    client, dispatcher = await answering(f"Let me see.\n{HERMES}\n{HERMES}")
    whole = (await client.chat.completions.create(**ASK, **FUNCTIONS)).choices[0]
    assert whole.finish_reason == "function_call"
    assert whole.message.tool_calls is None
    assert (whole.message.function_call.name, whole.message.function_call.arguments) == ("weather", ARGUMENTS)
    deltas = []
    async for chunk in await client.chat.completions.create(
        **ASK, **FUNCTIONS, function_call="auto", stream=True
    ):
        deltas += [(choice.delta, choice.finish_reason) for choice in chunk.choices]
    assert [reason for _, reason in deltas if reason] == ["function_call"]
    calls = [delta.function_call for delta, _ in deltas if delta.function_call]
    assert [call.name for call in calls if call.name] == ["weather"]
    assert "".join(call.arguments or "" for call in calls) == ARGUMENTS
    assert not any(request.sampling.grammar for request in dispatcher.requests)  # the model was free


async def test_a_function_that_must_be_called_is_held_to_its_schema(
    answering: Answering, model: ServedModel
) -> None:
    client, dispatcher = await answering(HERMES)
    choice = (
        await client.chat.completions.create(**ASK, **FUNCTIONS, function_call={"name": "weather"})
    ).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.content is None
    grammar = dispatcher.requests[0].sampling.grammar
    assert follows(grammar, HERMES, model)
    assert not follows(grammar, HERMES.replace("Paris", "Bonn"), model)
    assert not follows(grammar, f"{HERMES}\n{HERMES}", model)


async def test_no_function_where_none_is_wanted(answering: Answering) -> None:
    client, _ = await answering(HERMES)
    choice = (await client.chat.completions.create(**ASK, **FUNCTIONS, function_call="none")).choices[0]
    assert (choice.message.content, choice.message.function_call, choice.finish_reason) == (
        HERMES,
        None,
        "stop",
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({**FUNCTIONS, "tools": [WEATHER]}, "not allowed beside `tools`"),
        ({"function_call": "auto"}, "needs `functions`"),
        ({**FUNCTIONS, "function_call": {"name": "later"}}, "no function 'later' in `functions`"),
        ({**FUNCTIONS, "function_call": "required"}, "must be 'none', 'auto'"),
        ({"functions": []}, "functions"),
        ({**FUNCTIONS, "function_call": {"name": "now"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_functions_that_cannot_be(answering: Answering, fields: dict[str, Any], sentence: str) -> None:
    client, _ = await answering(HERMES)
    with pytest.raises(BadRequestError, match=sentence):
        await client.chat.completions.create(**ASK, extra_body=fields)


def test_a_chat_of_functions_reads_as_one_of_tools() -> None:
    called: dict[str, Any] = {"role": "assistant", "content": None}
    question, function = ASK["messages"][0], {"name": "weather", "arguments": ARGUMENTS}
    before = [
        question,
        {**called, "function_call": function},
        {"role": "function", "name": "weather", "content": "12"},
    ]
    since = [
        question,
        {**called, "tool_calls": [{"id": "function0", "type": "function", "function": function}]},
        {"role": "tool", "name": "weather", "tool_call_id": "function0", "content": "12"},
    ]
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}\n{% endfor %}")
    reported = [
        template.render(
            [
                m.for_template()
                for m in ChatCompletionRequest.model_validate({**ASK, "messages": messages}).messages
            ]
        )
        for messages in (before, since)
    ]
    assert [json.loads(line) for line in reported[0].splitlines()] == [
        json.loads(line) for line in reported[1].splitlines()
    ]
