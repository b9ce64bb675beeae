"""Structured output from a model that knows no structure: valid whatever happens to the workers."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import jsonschema
import pytest
from e2e.cluster import HTTP, MODEL_NAME, Cluster, wait_for

LONG = {
    "type": "object",
    "properties": {
        "rows": {
            "type": "array",
            "minItems": 80,
            "maxItems": 80,
            "items": {"type": "integer", "minimum": 100, "maximum": 99999},
        }
    },
    "required": ["rows"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["red", "green"]},
        "on": {"type": "boolean"},
    },
    "required": ["name", "kind", "on"],
    "additionalProperties": False,
}


def ask(cluster: Cluster, schema: dict[str, Any], **more: Any) -> Any:
    return cluster.client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Anything."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
        **{"temperature": 1.0, "max_tokens": 3000, **more},
    )


def test_every_answer_is_valid(cluster: Cluster) -> None:
    for seed in range(4):
        choice = ask(cluster, SCHEMA, seed=seed).choices[0]
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_the_first_token_follows_too(cluster: Cluster) -> None:
    extra = {"guided_choice": ["xyz", "yes", "y"]}
    answer = cluster.client.completions.create(
        model=MODEL_NAME, prompt="a", n=8, max_tokens=9, temperature=1.5, extra_body=extra
    )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert {choice.text for choice in answer.choices} <= {"xyz", "yes", "y"}


def ids_of(answer: Any) -> set[int]:
    return {token_id for choice in answer.choices for token_id in choice.token_ids}


def test_tokens_that_may_and_may_not_occur(cluster: Cluster) -> None:
    one, other = (
        HTTP.post(f"{cluster.url}/tokenize", json={"prompt": word}).json()["tokens"][-1] for word in "xy"
    )
    asked: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a", "n": 4, "max_tokens": 20, "temperature": 1.5}
    asked["logit_bias"] = {str(other): 100}
    only = {"allowed_token_ids": [one, other], "return_token_ids": True}
    assert ids_of(cluster.client.completions.create(**asked, extra_body=only)) == {other}
    rules = {**only, "bad_words": ["y"]}
    assert ids_of(cluster.client.completions.create(**asked, extra_body=rules)) == {one}


def test_a_required_call_has_valid_arguments(cluster: Cluster) -> None:
    tool: Any = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
    answer = cluster.client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Anything."}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.0,
        max_tokens=3000,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "paint"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize(
    ("role", "number"), [("decode", signal.SIGKILL), ("prefill", signal.SIGKILL), ("decode", signal.SIGTERM)]
)
def test_a_worker_dies_or_leaves_in_mid_json(cluster: Cluster, role: str, number: signal.Signals) -> None:
    cluster.wait_whole(2, 2)
    undisturbed = ask(cluster, LONG, seed=5, temperature=0.9).choices[0].message.content
    pieces: list[str] = []

    def read() -> None:
        for chunk in ask(cluster, LONG, seed=5, temperature=0.9, stream=True):
            pieces.extend(choice.delta.content or "" for choice in chunk.choices)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(
        "the answer is under way, or at its end: a slow reader gets much in one event",
        lambda: len(pieces) > 20 or not reader.is_alive(),
    )
    os.kill(cluster.busy_worker(role)["pid"], number)
    reader.join(90)
    assert "".join(pieces) == undisturbed
    jsonschema.validate(json.loads(undisturbed), LONG)
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()
