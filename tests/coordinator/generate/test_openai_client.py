"""What the official client sees: both endpoints, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from support.http_fakes import ANSWER, FakeDispatcher
from support.openai_requests import GREEDY, MESSAGES

from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.text.served_model import ServedModel


async def test_chat(client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel) -> None:
    answer = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    (request,) = dispatcher.requests
    prompt = model.tokenizer.fast.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|bos|><|system|>Be brief.<|end|><|user|>Hi!<|end|><|assistant|>"  # one BOS only
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert (
        answer.usage.completion_tokens
        == len(model.tokenizer.fast.encode(ANSWER, add_special_tokens=False).ids) + 1
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_where_the_time_went_is_in_the_usage(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
    timing = answer.usage.model_extra["splitserve"]  # type: ignore[union-attr,index]
    assert (timing["cached_tokens"], timing["dispatches"]) == (3, 1)
    stages = [timing[f"{stage}_s"] for stage in ("parse", "queue", "prefill", "handoff", "decode", "stream")]
    assert all(seconds > 0 for seconds in stages)
    assert stages[:3] == pytest.approx([stages[3]] * 3, abs=2e-6)  # as the fake dispatcher books it


async def test_chat_stream_order(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert "".join(choice.delta.content or "" for choice in own) == ANSWER
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * chunks[-1].usage.completion_tokens // 2 > 0
    assert "splitserve" in (chunks[-1].usage.model_extra or {})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ["fox"]},
        {"logprobs": 2},
        {"echo": True},
        {"max_tokens": 7},
        {"n": 2, "seed": 5, "temperature": 1},
    ],
)
async def test_joined_completion_stream_equals_the_unstreamed_text(client: AsyncOpenAI, options: Any) -> None:
    arguments: Any = {**GREEDY, "max_tokens": 200, **options, "prompt": ["one 日", "two"]}
    whole = await client.completions.create(**arguments)
    texts = dict.fromkeys(range(len(whole.choices)), "")
    async for chunk in await client.completions.create(stream=True, **arguments):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(2 * options.get("n", 1)))


async def test_no_usage_unless_asked(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(prompt="a", stream=True, **GREEDY)
    assert all(chunk.usage is None and chunk.choices for chunk in [chunk async for chunk in stream])


async def test_continuous_usage_grows(client: AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(prompt="a", stream=True, stream_options=options, **GREEDY)
    counts = [chunk.usage.completion_tokens for chunk in [chunk async for chunk in stream] if chunk.usage]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 16


async def test_prompts_in_every_form(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    ids = model.tokenizer.fast.encode("quick fox").ids
    forms: list[Any] = ["quick fox", ids, ["quick fox", "lazy dog"], [ids, [7, 8]]]
    for prompt in forms:
        dispatcher.requests.clear()
        answer = await client.completions.create(prompt=prompt, max_tokens=3, **GREEDY)
        assert list(dispatcher.requests[0].prompt_token_ids) == ids
        assert [choice.index for choice in answer.choices] == list(range(len(dispatcher.requests)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(
            len(request.prompt_token_ids) for request in dispatcher.requests
        )
        assert answer.usage.completion_tokens == 3 * len(dispatcher.requests)


async def test_completions_default_to_16_tokens_and_chat_to_the_context(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    answer = await client.completions.create(prompt="a", **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    await client.chat.completions.create(messages=MESSAGES, **GREEDY)
    completion, chat = dispatcher.requests
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == 2048 - len(chat.prompt_token_ids)


async def test_both_names_of_max_tokens(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await client.chat.completions.create(messages=MESSAGES, **{name: 5}, **GREEDY)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        assert answer.choices[0].finish_reason == "length"


async def test_defaults_come_from_the_generation_config(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    await client.completions.create(model="tiny", prompt="a")
    await client.completions.create(
        model="tiny", prompt="a", temperature=1, top_p=0, extra_body={"top_k": -1, "min_p": 0.1}
    )
    await client.completions.create(model="tiny", prompt="a", temperature=1e-40)
    first, second, coldest = (request.sampling for request in dispatcher.requests)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.6, 0.9, 20, 0.0)
    assert (second.temperature, second.top_k, second.min_p) == (1.0, 0, 0.1)
    assert 0 < second.top_p < 1e-5
    assert coldest.temperature == 0  # divided by 1e-40, several logits are infinite


async def test_every_sampling_field_reaches_the_workers(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    extra = {
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9, 10],
        "priority": 3,
    }
    await client.completions.create(
        model="tiny",
        prompt="a",
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        seed=-4,
        logprobs=3,
        user="me",
        extra_body=extra,
    )
    (request,) = dispatcher.requests
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.5,
        -0.5,
        1.5,
    )
    assert (sampling.logit_bias, sampling.logprobs, sampling.min_tokens) == ({5: -100.0}, 3, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.seed) == ((9, 10), True, (1 << 63) - 4)
    assert (request.session, request.priority) == ("me", 3)
    await client.completions.create(model="tiny", prompt="a", extra_headers={"X-Session-Id": "s1"})
    assert dispatcher.requests[-1].session == "s1"


async def test_content_parts_and_developer_role(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]
    await client.chat.completions.create(messages=messages, **GREEDY)
    prompt = model.tokenizer.fast.decode(dispatcher.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|bos|><|system|>a\nb<|end|><|user|>c<|end|><|assistant|>"


async def test_models(client: AsyncOpenAI) -> None:
    names = ["tiny", "tiny-1", "gpt-4o"]
    assert [model.id async for model in client.models.list()] == names
    assert [(await client.models.retrieve(name)).id for name in names] == names
    with pytest.raises(
        openai.NotFoundError, match="'huge' does not exist; this server has 'tiny', 'tiny-1',"
    ):
        await client.models.retrieve("huge")


async def test_a_request_may_give_any_of_the_names(client: AsyncOpenAI) -> None:
    for name in ("tiny-1", "gpt-4o"):
        answer = await client.completions.create(model=name, prompt="hello", max_tokens=2)
        assert answer.model == "tiny", "the first name"


async def test_an_error_before_the_first_token_is_an_http_error(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    cases: list[tuple[Any, type[openai.APIStatusError]]] = [
        ("overloaded", openai.RateLimitError),
        ("unavailable", openai.InternalServerError),
        ("deadline", openai.InternalServerError),
        ("refused", openai.BadRequestError),
        ("failed", openai.InternalServerError),
    ]
    for kind, expected in cases:
        dispatcher.refuse = lambda request, kind=kind: Ended(
            error=kind, message=f"because {kind}", retry_after_s=2.5
        )
        with pytest.raises(expected, match=f"because {kind}") as caught:
            await client.completions.create(prompt=["a", "b"], stream=True, n=2, **GREEDY)
        assert caught.value.response.headers.get("retry-after") == (
            "3" if kind in ("overloaded", "unavailable") else None
        )
    dispatcher.refuse = lambda request: None
    dispatcher.fail_after = (0, Ended(error="deadline"))
    with pytest.raises(openai.APIStatusError) as late:
        await client.completions.create(prompt="a", stream=True, **GREEDY)
    assert late.value.status_code == 504


async def test_an_error_within_a_stream_is_its_last_event(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    dispatcher.fail_after = (4, Ended(error="failed", message="all attempts used up"))
    stream = await client.chat.completions.create(messages=MESSAGES, stream=True, n=2, **GREEDY)
    reasons: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            reasons.extend(
                (choice.index, choice.finish_reason) for choice in chunk.choices if choice.finish_reason
            )

    with pytest.raises(openai.APIError, match="all attempts used up"):
        await read()
    assert sorted(reasons) == [(0, "error"), (1, "error")]


async def test_one_refused_choice_fails_the_whole_and_cancels_the_rest(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    dispatcher.hold = True
    dispatcher.refuse = lambda request: (
        Ended(error="overloaded") if request.request_id.endswith("-2") else None
    )
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(prompt="a", n=4, **GREEDY)
    await dispatcher.until(lambda: not dispatcher.running)
    assert len(dispatcher.requests) == 3
    assert len(dispatcher.cancelled) == 2


async def test_64_streams_at_once(client: AsyncOpenAI) -> None:
    async def one() -> str:
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*(one() for _ in range(64))) == [ANSWER] * 64
