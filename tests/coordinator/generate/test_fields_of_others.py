"""Fields that OpenAI does not have, named as vLLM names them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.asked_fields import BOTH, CHAT, TEXT, USER, Asked
from support.http_fakes import ANSWER, MAX_MODEL_LEN

from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.tenants.limits import salt_of
from splitserve.coordinator.text.served_model import ServedModel

HALF = {"role": "assistant", "content": "The opposite of big is "}


# --- the prompt -----------------------------------------------------------------------------------


async def test_an_assistants_message_is_continued(asked: Asked) -> None:
    path, body = CHAT
    more = {"messages": [USER, HALF], "continue_final_message": True}
    prompt = await asked.prompt(path, body, **more, add_generation_prompt=False)
    assert prompt.endswith(f"<|assistant|>{HALF['content']}")
    assert await asked.text(path, body, **more) == ANSWER
    assert await asked.text(path, body, **more, echo=True) == HALF["content"] + ANSWER
    assert await asked.text(path, body, echo=True) == ANSWER  # the last message is not the assistant's
    for odd in ({"messages": [USER]}, {"add_generation_prompt": True}):
        error = await asked.refusal(path, body, **{**more, **odd})
        assert "continue_final_message" in error["message"]


async def test_the_prompt_without_the_beginning_of_an_answer(asked: Asked) -> None:
    path, body = CHAT
    assert (await asked.prompt(path, body)).endswith("<|end|><|assistant|>")
    assert (await asked.prompt(path, body, add_generation_prompt=False)).endswith("Hi<|end|>")


async def test_special_tokens_of_the_tokenizer(asked: Asked) -> None:
    path, body = CHAT
    assert not (await asked.prompt(path, body)).startswith("<|bos|><|bos|>")
    assert (await asked.prompt(path, body, add_special_tokens=True)).startswith("<|bos|><|bos|>")
    path, body = TEXT
    assert await asked.prompt(path, body) == "<|bos|>Hi"
    assert await asked.prompt(path, body, add_special_tokens=False) == "Hi"


@BOTH
async def test_a_prompt_keeps_the_side_that_is_asked_for(
    asked: Asked, path: str, body: dict[str, Any]
) -> None:
    long = {"prompt": "word " * 90_000} if path == TEXT[0] else {"messages": [{**USER, "content": "a " * 9}]}
    keep: dict[str, Any] = {"truncate_prompt_tokens": 5, "max_tokens": 5}
    first = await asked.prompt(path, body, **long, **keep, truncation_side="right")
    last = await asked.prompt(path, body, **long, **keep, truncation_side="left")
    assert first.startswith("<|bos|>")
    assert not last.startswith("<|bos|>")
    assert last == await asked.prompt(path, body, **long, **keep)
    assert len(asked.last.prompt_token_ids) == 5
    await asked.answer(path, body, **{**long, **keep, "truncate_prompt_tokens": -1}, truncation_side="right")
    assert len(asked.last.prompt_token_ids) <= MAX_MODEL_LEN - 5


async def test_tokenize_counts_the_prompt_of_the_chat(asked: Asked, http: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "Rain or not"}}
    for more in (
        {"tools": [tool]},
        {"messages": [USER, HALF], "continue_final_message": True},
        {"add_generation_prompt": False},
        {"add_special_tokens": True},
    ):
        path, body = CHAT
        await asked.answer(path, body, **more)
        counted = (await http.post("/tokenize", json={"messages": [USER], **more})).json()
        assert counted["tokens"] == list(asked.last.prompt_token_ids)


async def test_a_template_of_the_client_where_the_server_trusts_it(
    asked: Asked, server: HttpServer, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = CHAT
    mine = {"chat_template": "{{ messages[0].content }}{% for d in documents %}[{{ d.text }}]{% endfor %}"}
    error = await asked.refusal(path, body, **mine)
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    object.__setattr__(model, "trusts_templates", True)
    try:
        documents = [{"text": "one"}, {"text": "two"}]
        assert await asked.prompt(path, body, **mine, documents=documents) == "Hi[one][two]"
        tokens = await asked.answer("/tokenize", {"messages": [USER]}, **mine, documents=documents)
        assert tokens["tokens"] == list(asked.last.prompt_token_ids)
        for bad in ("{% for", "{{ messages.__class__.__mro__ }}{{ 1 / 0 }}"):
            assert await asked.refusal(path, body, chat_template=bad)
    finally:
        object.__setattr__(model, "trusts_templates", False)


# --- where it runs --------------------------------------------------------------------------------


@BOTH
async def test_a_salt_of_the_client_divides_the_prefix_cache(
    asked: Asked, path: str, body: dict[str, Any]
) -> None:
    salts = []
    for salt in ("a", "b", "a", None):
        await asked.answer(path, body, cache_salt=salt)
        salts.append(asked.last.salt)
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    assert salts[3] == b""
    assert salt_of(b"tenant", "a") != salt_of(b"other", "a")
    assert (await asked.refusal(path, body, cache_salt=""))["param"] == "cache_salt"
