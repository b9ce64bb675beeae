"""Tools that may be called: what has begun as a call goes on as one, as strict tools and allowed ones demand;
all else stays free."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import BadRequestError, pydantic_function_tool
from pydantic import BaseModel
from support.tool_answers import ARGUMENTS, ASK, HERMES, NOW, WEATHER, Answering
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from splitserve.coordinator.chat_output.call_formats import FORMATS, ToolStyle
from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.generate.grammar import grammar_for
from splitserve.coordinator.generate.prompts import Prompt
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.coordinator.text.tokenizer import Tokenizer

STRICT: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
}
BAD: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {
            "properties": {"a": {"type": "strin"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
MISTRAL = f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]'
MISTRAL_ARGS = f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"
FREE = [
    "",
    "Hello, world.",
    "a < b <tool_cal [TOOL_CAL {",
    '{"answer": [5]}',
    '{"name": "Bob", "parameters": 1}',
    '"weather"',
]
CASES: list[tuple[ToolStyle, bool, list[str], list[str]]] = [
    (
        "hermes",
        special,
        [
            HERMES,
            f"Sure.\n{HERMES}\n{HERMES}\nSo.",
            '<tool_call>\n{"name": "now", "arguments": {"any": [1]}}\n</tool_call>',
        ],
        [
            HERMES.replace("3", '"3"'),
            HERMES.replace("weather", "wether"),
            "<tool_call>hm</tool_call>",
            "Sure.<tool_call>",
            HERMES[:-3],
        ],
    )
    for special in (False, True)
]
CASES += [
    (
        "llama3",
        special,
        [
            *(
                LLAMA,
                LLAMA.replace(" ", ""),
                LLAMA.replace("{", "{\n  "),
                '{"name": "now", "arguments": {"a": 1}}',
            ),
            *(LLAMA.replace('{"name', '{"type": "function", "name'), '{"name": "weatherman", "of": "Oslo"}'),
            *(["<|python_tag|>" + LLAMA] if special else ["<|python_tag|>print(1)"]),
        ],
        [
            LLAMA.replace("3", '"3"'),
            '{"name": "weather"}',
            f'{{"parameters": {ARGUMENTS}, "name": "weather"}}',
            f"{LLAMA} so",
        ],
    )
    for special in (False, True)
]
CASES += [
    (
        "mistral",
        False,
        [MISTRAL, f"Hm.{MISTRAL}", MISTRAL[:-1] + f", {MISTRAL[13:]}"],
        [MISTRAL.replace("3", '"3"'), "[TOOL_CALLS]", "[TOOL_CALLS]x"],
    ),
    (
        "mistral",
        True,
        [MISTRAL_ARGS, f"Hm.{MISTRAL_ARGS}{MISTRAL_ARGS}"],
        [MISTRAL_ARGS.replace("3", '"3"'), MISTRAL, "[TOOL_CALLS]"],
    ),
]


def with_marks(model: ServedModel, style: ChatStyle, special: bool, plain: bool = False) -> ServedModel:
    """The same model, of another style; ``special``: its marks are tokens of their own, which ``plain`` ones
    write out, as Qwen's do."""
    fast = FastTokenizer.from_str(model.tokenizer.fast.to_str())
    if special:
        fast.add_tokens([AddedToken(m, normalized=False, special=not plain) for m in style.marks(tools=True)])
    return dataclasses.replace(model, tokenizer=Tokenizer(fast), chat_style=style)


def grammar_of(model: ServedModel, **fields: Any) -> bytes:
    body = {"messages": ASK["messages"], "tools": [STRICT, NOW], **fields}
    return grammar_for(ChatCompletionRequest.model_validate_json(json.dumps(body)), model, Prompt([], ""))[0]


def followers(grammar: bytes, texts: list[str], model: ServedModel) -> list[str]:
    """Those of the texts that are whole outputs under the grammar, marks as the model writes them."""
    tokenizer = LLTokenizer(model.tokenizer.fast.to_str(), n_vocab=model.vocab_size, eos_token=[1])
    compiled = LLMatcher(tokenizer, grammar.decode(), log_level=0)
    assert not compiled.is_error(), compiled.get_error()
    found = []
    for text in texts:
        matcher, ids = compiled.deep_copy(), model.tokenizer.fast.encode(text, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("style", "special", "good", "bad"), CASES, ids=[f"{style}-{special}" for style, special, *_ in CASES]
)
def test_what_has_begun_as_a_call_goes_on_as_one(
    model: ServedModel, style: ToolStyle, special: bool, good: list[str], bad: list[str]
) -> None:
    served = with_marks(model, ChatStyle(style), special)
    assert all(served.tokenizer.is_apart(mark) for mark in FORMATS[style].openers) == special
    assert followers(grammar_of(served), [*FREE, *good, *bad], served) == [*FREE, *good]


def test_marks_may_be_tokens_that_are_not_special(model: ServedModel) -> None:
    """Qwen's ``<tool_call>`` is one: llguidance keeps it apart from text all the same."""
    served = with_marks(model, ChatStyle("hermes"), special=True, plain=True)
    calls = [HERMES, f"{HERMES}\n{HERMES}"]
    for asked in ({}, {"tool_choice": "required"}):
        assert followers(grammar_of(served, **asked), calls, served) == calls


@pytest.mark.parametrize(
    ("style", "mark"),
    [
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<function="),
        ("granite", "<tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>"),
        ("deepseek_v32", "<｜DSML｜invoke"),
        ("minimax_m2", "<minimax:tool_call>"),
        ("seed_oss", "<seed:tool_call>"),
        ("gemma4", "<|tool_call>"),
    ],
)
def test_a_mark_that_opens_a_call_cannot_be_spelled_out(
    model: ServedModel, style: ToolStyle, mark: str
) -> None:
    """It would be read as a call that no schema holds, whose closing token free text does not allow. Calls
    begin with the mark around them all, or with a token."""
    served = with_marks(model, ChatStyle(style), special=True)
    spelled, last = (
        model.tokenizer.fast.encode(t, add_special_tokens=False).ids for t in (mark[:-1], mark[-1])
    )
    tokenizer = LLTokenizer(served.tokenizer.fast.to_str(), n_vocab=served.vocab_size, eos_token=[1])
    matcher = LLMatcher(tokenizer, grammar_of(served).decode(), log_level=0)
    assert matcher.try_consume_tokens(spelled) == len(spelled)
    assert matcher.try_consume_tokens(last) == 0


@pytest.mark.parametrize(("special", "plain"), [(False, False), (True, False), (True, True)])
def test_after_a_thought_too(model: ServedModel, special: bool, plain: bool) -> None:
    served = with_marks(model, ChatStyle("hermes", "think"), special, plain)
    thought = "<think>\nA <tool_ thing?\n</think>\n"
    good = [thought + HERMES, thought + "Yes.", HERMES, "Yes."]
    assert followers(grammar_of(served), [*good, thought + HERMES.replace("3", '"3"')], served) == good


def test_only_the_allowed_ones(model: ServedModel) -> None:
    served = with_marks(model, ChatStyle("hermes"), special=False)
    now, hello = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "Hello"
    texts = [now, hello, HERMES]
    assert followers(grammar_of(served, tools=[WEATHER, NOW], tool_choice=ALLOWED), texts, served) == [
        now,
        hello,
    ]
    must = {**ALLOWED, "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "required"}}
    assert followers(grammar_of(served, tool_choice=must), texts, served) == [now]
    assert followers(
        grammar_of(served, parallel_tool_calls=False), [HERMES, f"{HERMES}\n{HERMES}"], served
    ) == [HERMES]


def test_where_nothing_asks_for_it_nothing_is_held(model: ServedModel) -> None:
    assert grammar_of(model, tools=[WEATHER, NOW]) == b""
    assert grammar_of(model, tool_choice="none") == b""


async def test_the_model_is_told_of_all_and_calls_what_it_may(answering: Answering) -> None:
    client, dispatcher = await answering(HERMES)
    choice = (await client.chat.completions.create(**ASK, tools=[STRICT, NOW], tool_choice=ALLOWED)).choices[
        0
    ]
    assert choice.finish_reason == "tool_calls"  # this fake's answer, forced or not
    reported = len(dispatcher.requests[-1].prompt_token_ids)
    await client.chat.completions.create(**ASK, tools=[STRICT, NOW])
    assert reported == len(dispatcher.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": []}}}, "allowed_tools"),
        ({"tool_choice": {**ALLOWED, "allowed_tools": {"mode": "always", "tools": [NOW]}}}, "allowed_tools"),
        ({"tool_choice": ALLOWED, "tools": [WEATHER]}, "there is no function 'now'"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"tools": [BAD]}, "strin"),
    ],
    ids=["none", "mode", "unknown", "ignore_eos", "schema"],
)
async def test_what_cannot_be(answering: Answering, fields: dict[str, Any], reason: str) -> None:
    client, _ = await answering("")
    with pytest.raises(BadRequestError, match=reason):
        await client.chat.completions.create(**{**ASK, "tools": [STRICT, NOW], **fields})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_of_a_thought_are_counted(
    answering: Answering, model: ServedModel, stream: bool
) -> None:
    thought, rest = "<think>\nHm, so.</think>", "\n\nYes, <think>no</think>."
    client, _ = await answering(thought + rest, ChatStyle(thoughts="think"))
    if stream:
        chunks = await client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage async for chunk in chunks][-1]
    else:
        usage = (await client.chat.completions.create(**ASK)).usage
    ids = model.tokenizer.fast.encode(thought + rest, add_special_tokens=False).ids
    texts = [model.tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    assert usage.completion_tokens_details.reasoning_tokens == next(
        n for n, text in enumerate(texts) if "</think>" in text
    )
    plain, _ = await answering("Yes, <think>no</think>.", ChatStyle(thoughts="think"))
    assert (await plain.chat.completions.create(**ASK)).usage.completion_tokens_details.reasoning_tokens == 0


class Weather(BaseModel):
    city: str
    days: int


async def test_a_tool_as_the_client_makes_it_of_a_model(answering: Answering) -> None:
    client, dispatcher = await answering(HERMES.replace("weather", "Weather"))
    answer = await client.chat.completions.parse(
        **ASK, tools=[pydantic_function_tool(Weather)]
    )  # strict, and may be called
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Paris", days=3)
    assert dispatcher.requests[-1].sampling.grammar
