"""Every request field of OpenAI's published description, and of the servers whose clients come here, is
honoured, refused, or on the list of those that cannot change an answer.

OpenAI's are those of its own client, which is generated from the description: a version with a new field
fails here. The others stand in request_fields.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import openai
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from pydantic import BaseModel
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.generate.bodies.completion import CompletionRequest
from splitserve.coordinator.generate.bodies.fields import IGNORED, REFUSED
from splitserve.coordinator.generate.bodies.sampling import StreamOptions
from splitserve.coordinator.generate.token_pages import DetokenizeRequest, TokenizeRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, type[BaseModel]] = {
    CHAT: ChatCompletionRequest,
    TEXT: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "Hi"},
}
OPENAI = {
    CHAT: get_type_hints(chats.CompletionCreateParamsStreaming),
    TEXT: get_type_hints(completions.CompletionCreateParamsStreaming),
}
OTHERS: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("request_fields.json").read_text()
)
FIELDS = [
    *((f"OpenAI {openai.__version__}", path, name) for path, names in OPENAI.items() for name in names),
    *((server, path, name) for server, of in OTHERS.items() for path, names in of.items() for name in names),
]


@pytest.mark.parametrize(("server", "path", "name"), FIELDS)
def test_a_field_is_honoured_refused_or_cannot_change_an_answer(server: str, path: str, name: str) -> None:
    places = [name in BODIES[path].model_fields, name in REFUSED, name in IGNORED]
    assert sum(places) == 1, (
        f"{name} of {server} at {path} has {sum(places)} places: build it, or put it with the reason into "
        "bodies/fields.py"
    )


def test_the_options_of_streams_are_honoured() -> None:
    assert set(get_type_hints(ChatCompletionStreamOptionsParam)) <= set(StreamOptions.model_fields)


def test_no_field_is_on_two_lists() -> None:
    honoured = {name for body in BODIES.values() for name in body.model_fields}
    assert not set(IGNORED) & set(REFUSED)
    assert not honoured & (set(IGNORED) | set(REFUSED))
    assert all(get_args(kind) is not None for kind in OPENAI[CHAT].values())


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_built_is_refused_by_its_name(http: httpx.AsyncClient, name: str) -> None:
    why, neutral = REFUSED[name]
    for path, body in NEEDED.items():
        answer = await http.post(path, json={**body, name: {"a": 1}})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert error["message"] == f"{name}: is not supported here: {why}"
        for value in (None, *neutral):
            assert (await http.post(path, json={**body, name: value})).status_code == 200


@pytest.mark.parametrize("name", IGNORED)
async def test_what_cannot_change_an_answer_is_taken(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path, body in NEEDED.items():
        assert (await http.post(path, json={**body, name: 1})).status_code == 200
    assert not [record for record in caplog.records if "ignored unknown fields" in record.getMessage()]
