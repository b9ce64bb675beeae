"""Tool calls and thoughts through the real client: what a model wrote becomes deltas, what must be called is
held to by a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from coordinator.generate.test_structured_output import follows
from openai import BadRequestError
from support.tool_answers import ARGUMENTS, ASK, HERMES, NOW, PARAMETERS, WEATHER, Answering

from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.text.chat_template import ChatTemplate
from splitserve.coordinator.text.served_model import ServedModel


async def test_a_call_is_told_of_as_it_grows(answering: Answering) -> None:
    client, _ = await answering(f"Let me see.\n{HERMES}\n{HERMES}")
    whole = (await client.chat.completions.create(**ASK, tools=[WEATHER])).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me see."
    assert [(c.function.name, c.function.arguments) for c in whole.message.tool_calls] == [
        ("weather", ARGUMENTS)
    ] * 2
    deltas = []
    async for chunk in await client.chat.completions.create(**ASK, tools=[WEATHER], stream=True):
        deltas += [(choice.delta, choice.finish_reason) for choice in chunk.choices]
    assert "".join(delta.content or "" for delta, _ in deltas) == "Let me see."
    assert [reason for _, reason in deltas if reason] == ["tool_calls"]
    for index in (0, 1):
        calls = [call for delta, _ in deltas for call in delta.tool_calls or () if call.index == index]
        assert calls[0].id
        assert calls[0].function.name == "weather"
        assert not any(call.id or call.function.name for call in calls[1:])
        assert len(calls) > 5  # piece by piece
        assert "".join(call.function.arguments or "" for call in calls) == ARGUMENTS


async def test_one_call_where_only_one_is_wanted(answering: Answering) -> None:
    client, _ = await answering(f"{HERMES}\n{HERMES}")
    choice = (
        await client.chat.completions.create(**ASK, tools=[WEATHER], parallel_tool_calls=False)
    ).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.message.content is None


async def test_no_call_where_none_is_wanted(answering: Answering) -> None:
    client, dispatcher = await answering(HERMES)
    choice = (await client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice="none")).choices[0]
    assert choice.message.content == HERMES
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert len(dispatcher.requests[0].prompt_token_ids) < 40  # without the tools


async def test_log_probabilities_of_every_token(answering: Answering, model: ServedModel) -> None:
    client, _ = await answering(HERMES)
    entries = []
    async for chunk in await client.chat.completions.create(
        **ASK, tools=[WEATHER], stream=True, logprobs=True
    ):
        entries += [
            entry.token
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content or ()
        ]
    assert "".join(entries).startswith(HERMES)


@pytest.mark.parametrize(
    ("style", "one", "two"),
    [
        ("hermes", HERMES, f"{HERMES}\n{HERMES}"),
        ("llama3", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', None),
        (
            "mistral",
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, '
            '{"name": "now", "arguments": {}}]',
        ),
    ],
)
async def test_what_must_be_called_is_held_to(
    answering: Answering, model: ServedModel, style: Any, one: str, two: str | None
) -> None:
    client, dispatcher = await answering(one, ChatStyle(style))
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = await client.chat.completions.create(**ASK, tools=[WEATHER, NOW], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather",
            {"city": "Paris", "days": 3},
        )
        grammar = dispatcher.requests[-1].sampling.grammar
        assert follows(grammar, one, model)
        assert not follows(grammar, one.replace("3", '"3"'), model)
        assert not follows(grammar, one.replace("weather", "wether"), model)
        assert not follows(grammar, "Hello", model)
        if two is not None:
            assert follows(grammar, two, model) == (choice == "required")
    assert follows(grammar, one, model)


async def test_a_format_or_a_call_where_both_may_be(answering: Answering, model: ServedModel) -> None:
    client, dispatcher = await answering('{"a": 1}')
    answer = await client.chat.completions.create(
        **ASK, tools=[WEATHER], response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content == '{"a": 1}'
    grammar = dispatcher.requests[-1].sampling.grammar
    assert [follows(grammar, text, model) for text in (HERMES, "{}", "Hello")] == [True, True, False]


async def test_a_schema_that_is_none(answering: Answering) -> None:
    client, _ = await answering("")
    bad: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}},
    }
    with pytest.raises(BadRequestError, match="strin"):
        await client.chat.completions.create(**ASK, tools=[bad], tool_choice="required")


async def test_thoughts_are_told_apart(answering: Answering, model: ServedModel) -> None:
    thought = "<think>\nHm, so.</think>\n\n"
    client, dispatcher = await answering(f"{thought}{HERMES}", ChatStyle(thoughts="think"))
    message = (
        (await client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice="required"))
        .choices[0]
        .message
    )
    assert message.model_extra["reasoning_content"] == "Hm, so."
    assert message.content is None
    assert message.tool_calls[0].function.arguments == ARGUMENTS
    grammar = dispatcher.requests[-1].sampling.grammar
    assert [follows(grammar, text, model) for text in (thought + HERMES, HERMES, thought)] == [
        True,
        True,
        False,
    ]
    pieces = [
        choice.delta.model_extra.get("reasoning_content") or ""
        async for chunk in await client.chat.completions.create(**ASK, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(pieces) == "Hm, so."


async def test_a_thought_that_the_template_opens(answering: Answering, model: ServedModel) -> None:
    client, dispatcher = await answering(
        "Hm.</think>{}", ChatStyle(thoughts="think"), "{{ messages[0].content }}<think>\n"
    )
    answer = await client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert answer.choices[0].message.model_extra["reasoning_content"] == "Hm."
    assert answer.choices[0].message.content == "{}"
    grammar = dispatcher.requests[-1].sampling.grammar
    assert [follows(grammar, text, model) for text in ("Hm.</think>{}", "{}")] == [True, False]


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '<tool_call>' }}", ChatStyle("hermes")),
        ('{"parameters": {{ tools }}}', ChatStyle("llama3")),
        ("[TOOL_CALLS]{{ tools }}", ChatStyle("mistral")),
        ("<|im_start|>{{ '</think>' }}<tool_call>", ChatStyle("hermes", "think")),
        ("", ChatStyle("hermes")),
    ],
)
def test_the_template_tells_the_style(template: str, style: ChatStyle) -> None:
    assert ChatStyle.of(template) == style
    assert ChatStyle.of(template, "mistral", "none") == ChatStyle("mistral")


def test_templates_get_tools_and_calls_as_they_want_them() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages: Any = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "a", "content": "Rain."}]
    request = ChatCompletionRequest.model_validate_json(
        json.dumps({"messages": messages, "tools": [WEATHER]})
    )
    source = (
        "{{ tools[0].function.name }}|{{ messages[1].tool_calls[0].function.arguments.days }}|{{ "
        "messages[2].tool_call_id }}"
    )
    messages = [message.for_template() for message in request.messages]
    assert ChatTemplate(source).render(messages, tools=[WEATHER]) == "weather|3|a"
    reported = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}").render(
        messages, tools=[WEATHER]
    )
    assert reported.startswith("system: ")
    assert json.dumps(PARAMETERS) in reported
