"""Values out of bounds: 400, with the field's name."""

from __future__ import annotations

from typing import Any

import httpx
from support.bad_values import CHAT, TEXT, error_of
from support.http_fakes import MAX_MODEL_LEN, FakeDispatcher

from splitserve.coordinator.text.served_model import ServedModel

TOOL = {"type": "function", "function": {"name": "a"}}
BAD_FOR_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": -(1 << 63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_grammar": ["a"]}, "guided_grammar"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[True]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [1 << 70]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"echo": "yes"}, "echo"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": 5}, "tools"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "b"}}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "required", "tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]
CASES = [
    *(("/v1/completions", {**TEXT, **bad}, param) for bad, param in BAD_FOR_BOTH + BAD_TEXT),
    *(("/v1/chat/completions", {**CHAT, **bad}, param) for bad, param in BAD_FOR_BOTH + BAD_CHAT),
]


async def test_bad_values_are_400_and_name_the_field(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    for path, body, param in CASES:
        response = await http.post(path, json=body)
        assert response.status_code == 400, (body, response.text)
        error = error_of(response)
        assert param.split("[")[0].split(".")[0] in error["message"], (body, error)
        assert error["param"] == param, (body, error)
        assert error["type"] == "invalid_request_error"
        streamed = await http.post(path, json={"stream": True, **body})
        assert streamed.status_code == (400 if param != "stream_options" else 200), (body, streamed.text)
    assert all(request.request_id.startswith("c") for request in dispatcher.requests)


async def test_logit_bias_names_every_bad_key_and_the_vocabulary(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={**TEXT, "logit_bias": {"600": 1, "5": 1, "700": 1}})
    message = error_of(response)["message"]
    assert all(part in message for part in ("600", "700", "512"))
    response = await http.post("/v1/completions", json={**TEXT, "logit_bias": {"x": 1, "y": 1}})
    assert all(part in error_of(response)["message"] for part in ("'x'", "'y'"))


async def test_too_long_names_both_numbers(http: httpx.AsyncClient, model: ServedModel) -> None:
    prompt = [5] * 2000
    for max_tokens, path, body in (
        (49, "/v1/completions", {**TEXT, "prompt": prompt}),
        (2048, "/v1/chat/completions", CHAT),
    ):
        error = error_of(await http.post(path, json={**body, "max_tokens": max_tokens}))
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
        assert str(max_tokens) in error["message"]
        assert ("2000" if body is not CHAT else "5") in error["message"]
    error = error_of(await http.post("/v1/completions", json={**TEXT, "max_tokens": 10**9}))
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    error = error_of(await http.post("/v1/completions", json={**TEXT, "prompt": [5] * 2048}))
    assert "2048" in error["message"]
    assert (
        await http.post("/v1/completions", json={**TEXT, "prompt": [5] * 2040})
    ).status_code == 200  # the default is cut
