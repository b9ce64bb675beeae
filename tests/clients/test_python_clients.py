"""LiteLLM and LangChain, where they are installed: in the environment that deploy/test_clients.sh makes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from support.http_fakes import ANSWER, CITY

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning"
)
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
}
HOW = "runs by deploy/test_clients.sh"


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("litellm", reason=HOW)


@pytest.fixture
def langchain(base_url: str) -> Any:
    """A model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("langchain_openai", reason=HOW)
    return module.ChatOpenAI(base_url=base_url, api_key="none", model="tiny", temperature=0, max_retries=0)


def where(base_url: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {
        "model": "openai/tiny",
        "api_base": base_url,
        "api_key": "none",
        "messages": messages,
        "temperature": 0,
    }


def test_litellm(litellm: Any, base_url: str) -> None:
    ask = where(base_url)
    assert litellm.completion(**ask).choices[0].message.content == ANSWER
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert litellm.completion(**ask, tools=[WEATHER]).choices[0].message.content == ANSWER
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ask, max_tokens=1_000_000)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**ask, "temperature": 9})


def test_litellm_calls_tools(litellm: Any, base_url: str) -> None:
    ask = {**where(base_url), "tools": [WEATHER], "tool_choice": "required"}
    choice = litellm.completion(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, call.function.arguments) == (
        "tool_calls",
        "weather",
        CITY,
    )
    whole = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True)))
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", CITY)


def test_langchain(langchain: Any) -> None:
    assert langchain.invoke("Hi").content == ANSWER
    assert "".join(chunk.content for chunk in langchain.stream("Hi")) == ANSWER
    assert langchain.bind_tools([WEATHER]).invoke("Hi").content == ANSWER
    assert [each.content for each in langchain.batch(["Hi", "Ho"])] == [ANSWER, ANSWER]


def test_langchain_calls_tools(langchain: Any) -> None:
    bound = langchain.bind_tools([WEATHER], tool_choice="required")
    message = bound.invoke("Weather?")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("weather", {"city": "Paris"})]
    chunks = list(bound.stream("Weather?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", {"city": "Paris"})]
    assert langchain.with_structured_output({"title": "place", **PARAMETERS}, method="json_schema").invoke(
        "Where?"
    ) == {"city": "Paris"}
