"""Ollama's bodies and answers, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from splitserve.coordinator.dialects.ollama import OllamaAnswer
from splitserve.coordinator.dialects.ollama_body import OllamaChatRequest, OllamaGenerateRequest

HELLO: Any = [{"role": "user", "content": "Hi!"}]


def test_results_find_their_calls() -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}, **more}

    turns = [
        *HELLO,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("f"), call("g"), call("h", id="own")]},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "tool_call_id": "own", "content": "3"},
    ]
    chat = OllamaChatRequest.model_validate({"model": "tiny:latest", "messages": turns}).for_chat()
    assert chat["model"] == "tiny"
    assistant = chat["messages"][1]
    assert assistant["reasoning_content"] == "Hm."
    assert [each["id"] for each in assistant["tool_calls"]] == ["call00000", "call00001", "own"]
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    answered = [(each["tool_call_id"], each["content"]) for each in chat["messages"][2:]]
    assert answered == [("call00001", "2"), ("call00000", "1"), ("own", "3")]


def test_thoughts_have_a_field_of_their_own() -> None:
    for generates in (False, True):
        answer = OllamaAnswer("tiny", generates=generates)
        deltas = ({"reasoning_content": "H"}, {"reasoning_content": "m."}, {"content": "Yes."})
        parts = [
            part
            for delta in deltas
            for part in answer.feed({"choices": [{"delta": delta, "finish_reason": None}]})
        ]
        inner = [part if generates else part["message"] for part in (*parts, answer.whole())]
        assert [each.get("thinking") for each in inner] == ["H", "m.", None, "Hm."]
        assert inner[-1]["response" if generates else "content"] == "Yes."


@pytest.mark.parametrize(
    ("think", "kwargs", "effort"), [(False, False, None), (True, True, None), ("low", True, "low")]
)
def test_think_is_the_templates_to_know(think: Any, kwargs: bool, effort: str | None) -> None:
    body = {"model": "m", "messages": HELLO, "think": think}
    chat = OllamaChatRequest.model_validate(body).for_chat()
    assert chat["chat_template_kwargs"] == {"enable_thinking": kwargs}
    assert chat.get("reasoning_effort") == effort


@pytest.mark.parametrize(
    "fields",
    [{"suffix": "b"}, {"template": "{{ .Prompt }}"}, {"context": [1, 2]}, {"raw": True, "system": "s"}],
)
def test_what_generate_does_not_have(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OllamaGenerateRequest.model_validate({"model": "m", "prompt": "a", **fields})
