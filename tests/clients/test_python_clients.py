"""LiteLLM and LangChain, where they are installed: `pip install "splitserve[clients]"`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from support.http_fakes import ANSWER

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
HOW = 'needs `pip install "splitserve[clients]"`'


def test_litellm(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm = pytest.importorskip("litellm", reason=HOW)
    where = {"model": "openai/tiny", "api_base": base_url, "api_key": "none", "messages": [{"role": "user", "content": "Hi"}]}
    whole = litellm.completion(**where, temperature=0)
    assert whole.choices[0].message.content == ANSWER
    chunks = list(litellm.completion(**where, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert litellm.completion(**where, temperature=0, tools=[WEATHER]).choices[0].message.content == ANSWER
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, max_tokens=1_000_000)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**where, temperature=9)


def test_langchain(base_url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        langchain = pytest.importorskip("langchain_openai", reason=HOW)
    model = langchain.ChatOpenAI(base_url=base_url, api_key="none", model="tiny", temperature=0, max_retries=0)
    assert model.invoke("Hi").content == ANSWER
    assert "".join(chunk.content for chunk in model.stream("Hi")) == ANSWER
    assert model.bind_tools([WEATHER]).invoke("Hi").content == ANSWER
    assert [each.content for each in model.batch(["Hi", "Ho"])] == [ANSWER, ANSWER]
