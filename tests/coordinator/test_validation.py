"""The error of a bad body is plain: what must be given, and what was."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from splitserve.bench.http.hostile_parts import FIELDS, SOME_VALUES
from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.plan import parse
from splitserve.coordinator.http.call import Endpoint
from splitserve.coordinator.validation import LONE

TEXT: Endpoint = "/v1/completions"
CHAT: Endpoint = "/v1/chat/completions"
OTHERS_WORDS = re.compile(
    r"[Ii]nput should|Field required|should (be|have|match)|validation"
    r"|valid (string|number|integer|boolean|list)"
)


def reported(endpoint: Endpoint, body: Any) -> str:
    """The message; empty where the body is good."""
    try:
        parse(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())
    except InvalidRequest as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "temperature": 2.5}, "temperature: must be at most 2, not 2.5"),
        ({"prompt": "a", "n": True}, "n: must be a whole number, not true"),
        ({"prompt": "a", "stream": "yes"}, 'stream: must be true or false, not "yes"'),
        ({"prompt": "a", "user": 10**300}, "user: must be a string"),
        ({"prompt": "a", "user": "x" * 513}, "user: must have at most 512 characters"),
        ({"prompt": "a", "seed": "s" * 99}, "seed: must be a whole number"),
        ({"prompt": "a", "stop_token_ids": [1] * 65}, "stop_token_ids: must have at most 64 entries"),
        (
            {"prompt": "a", "service_tier": "é"},
            "service_tier: must be 'auto', 'default', 'flex', 'scale' or 'priority', not \"é\"",
        ),
        ({}, "prompt: must be given"),
        (
            {"prompt": "a", "n": 0, "seed": None, "top_p": "one"},
            'top_p: must be a number, not "one"; n: must be at least 1, not 0',
        ),
        (b"", "The body is not valid JSON: it is empty."),
        (
            b'{"prompt": ',
            "The body is not valid JSON: it ends within a value at line 1 column 11, near 'prompt'.",
        ),
        *(
            (
                b'{\r\n"user": "x",\n "prompt": "%s"}' % text,
                f"The body is not valid JSON: {LONE} at line 3 column {column}, near 'prompt'.",
            )
            for text, column in ((rb"\ud800", 19), (rb"\udc00", 18), (rb"a\ud800\u0041", 25))
        ),
        (
            b'{"prompt": "\xff"}',
            "The body is not valid JSON: bytes that are not UTF-8 at line 1 column 13, near 'prompt'.",
        ),
        ({"prompt": "a", "stop": ""}, "stop: a string of 0 characters; 1 to 1024 are allowed"),
        (
            {"prompt": "a", "stop": ["a", "b" * 1025]},
            "stop: a string of 1025 characters; 1 to 1024 are allowed",
        ),
        ({"prompt": "a", "stop": ["a"] * 33}, "stop: has 33 strings; at most 32 are allowed"),
        (b"[]", "The body must be a JSON object."),
    ],
)
def test_the_sentence_names_the_field_what_it_must_be_and_what_it_was(body: Any, message: str) -> None:
    assert reported(TEXT, body) == message


def test_an_empty_list_is_said_to_be_empty() -> None:
    assert reported(CHAT, {"messages": []}) == "messages: must not be empty"


@pytest.mark.parametrize("endpoint", [TEXT, CHAT])
def test_no_sentence_is_the_librarys(endpoint: Endpoint) -> None:
    good: dict[str, Any] = (
        {"prompt": "a"} if endpoint == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    )
    messages = {reported(endpoint, {**good, field: value}) for field in FIELDS for value in SOME_VALUES}
    assert len(messages) > 100
    assert [message for message in messages if OTHERS_WORDS.search(message)] == []
