"""OpenAI's client: seeds, stop strings, bounds and log probabilities of the output."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI
from support.http_fakes import ANSWER, FakeDispatcher
from support.openai_requests import GREEDY, MESSAGES

from splitserve.coordinator.text.served_model import ServedModel


async def test_a_seed_repeats_and_choices_differ(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    answers = [
        await client.completions.create(model="tiny", prompt="a", seed=12, n=3, temperature=1)
        for _ in range(2)
    ]
    first, second = ([choice.text for choice in answer.choices] for answer in answers)
    assert first == second
    assert len(set(first)) == 3
    one = await client.completions.create(model="tiny", prompt="a", seed=12, temperature=1)
    assert one.choices[0].text == first[0]
    unseeded = [
        await client.completions.create(model="tiny", prompt="a", n=2, temperature=1) for _ in range(2)
    ]
    assert len({request.sampling.seed for request in dispatcher.requests[-4:]}) == 4
    assert unseeded[0].choices[0].text


async def test_n_at_temperature_zero(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(messages=MESSAGES, n=3, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


async def test_min_tokens_with_ignore_eos_gives_exact_counts(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        prompt="a", max_tokens=300, extra_body={"min_tokens": 300, "ignore_eos": True}, **GREEDY
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 300


@pytest.mark.parametrize("stop", ["brown fox", ["zzz", "dog", "brown fox"], "世界", "o"])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_are_cut_and_cancel_the_request(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, stop: Any, stream: bool
) -> None:
    dispatcher.step_s = 0.001
    text, reasons = "", []
    if stream:
        async for chunk in await client.chat.completions.create(
            messages=MESSAGES, stop=stop, stream=True, **GREEDY
        ):
            text += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
    else:
        answer = await client.chat.completions.create(messages=MESSAGES, stop=stop, **GREEDY)
        text, reasons = answer.choices[0].message.content or "", [answer.choices[0].finish_reason]
    first = min(ANSWER.index(s) for s in ([stop] if isinstance(stop, str) else stop) if s in ANSWER)
    assert text == ANSWER[:first]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert dispatcher.cancelled == [dispatcher.requests[0].request_id]


async def test_completion_logprobs(client: AsyncOpenAI, model: ServedModel) -> None:
    answer = await client.completions.create(prompt="ab", logprobs=2, max_tokens=100, stop="fox", **GREEDY)
    (choice,) = answer.choices
    found = choice.logprobs
    assert found is not None
    lengths = {
        len(values or ())
        for values in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)
    }
    assert len(lengths) == 1
    assert found.text_offset is not None
    assert found.text_offset[0] == 0
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[-1] < len(choice.text)  # none of the stop string's
    assert "fox" not in "".join(found.tokens or [])
    assert found.top_logprobs is not None
    assert all(1 <= len(top) <= 3 and min(top.values()) >= -9999 for top in found.top_logprobs)
    none = await client.completions.create(prompt="ab", logprobs=0, max_tokens=3, **GREEDY)
    assert none.choices[0].logprobs is not None
    assert [list(top) for top in none.choices[0].logprobs.top_logprobs or []] == [
        [t] for t in none.choices[0].logprobs.tokens or []
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["quick fox", [0, 50, 60, 70]])
async def test_echo_scores_the_prompt(
    client: AsyncOpenAI, model: ServedModel, prompt: Any, stream: bool
) -> None:
    text, tokens, scores, reasons = "", [], [], []
    answer = await client.completions.create(
        prompt=prompt, echo=True, logprobs=1, max_tokens=0, stream=stream, **GREEDY
    )
    parts: list[Any] = [chunk async for chunk in answer] if stream else [answer]  # type: ignore[union-attr]
    for part in parts:
        choice = part.choices[0]
        text += choice.text
        tokens += choice.logprobs.tokens or []  # type: ignore[union-attr]
        scores += choice.logprobs.token_logprobs or []  # type: ignore[union-attr]
        reasons.append(choice.finish_reason)
    ids = model.tokenizer.fast.encode(prompt).ids if isinstance(prompt, str) else prompt
    assert text == (prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt))
    assert len(tokens) == len(scores) == len(ids)
    assert scores[0] is None
    assert None not in scores[1:]
    assert reasons[-1] == "length"


async def test_echo_with_output(client: AsyncOpenAI, model: ServedModel) -> None:
    answer = await client.completions.create(
        prompt="quick fox", echo=True, logprobs=0, max_tokens=4, **GREEDY
    )
    (choice,) = answer.choices
    assert choice.text.startswith("quick foxHell")
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert "".join(tokens[1:]) == choice.text  # the first is BOS
    for token, offset in zip(tokens[1:], offsets[1:], strict=True):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("k", [None, 0, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(client: AsyncOpenAI, k: int | None, stream: bool) -> None:
    options: Any = {} if k is None else {"top_logprobs": k}
    answer = await client.chat.completions.create(
        messages=MESSAGES, logprobs=True, stream=stream, **options, **GREEDY
    )
    entries: list[Any] = []
    if stream:
        async for chunk in answer:  # type: ignore[union-attr]
            found = chunk.choices[0].logprobs
            entries += found.content if found else []
    else:
        entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert all(isinstance(entry.bytes, list) and len(entry.top_logprobs) == (k or 0) for entry in entries)
    assert all(top.logprob >= -9999 for entry in entries for top in entry.top_logprobs)
    spelled = b"".join(bytes(entry.bytes) for entry in entries[:-1])  # the last is EOS
    assert spelled.decode() == ANSWER
