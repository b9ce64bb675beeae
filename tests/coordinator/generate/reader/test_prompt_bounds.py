"""A prompt that is longer than the context can be is refused before it is tokenized, and a key's limits are
asked before that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_fakes import (
    MAX_MODEL_LEN,
    FakeDispatcher,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    wordpiece_tokenizer,
)
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers, pre_tokenizers

from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.shared_limiter import SharedLimiter
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text import tokenizer as module
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.coordinator.text.tokenizer import Tokenizer


def dropping_tokenizer() -> FastTokenizer:
    """Its normalizer drops white space at the ends."""
    fast = byte_level_tokenizer()
    fast.normalizer = normalizers.Strip()
    return fast


def composing_tokenizer() -> FastTokenizer:
    """Qwen's kind: NFC before byte-level BPE."""
    fast = byte_level_tokenizer()
    fast.normalizer = normalizers.NFC()
    return fast


def splitting_tokenizer() -> FastTokenizer:
    """Its pre-tokenizer drops white space."""
    fast = byte_level_tokenizer()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return fast


BOUNDED = [byte_level_tokenizer, sentencepiece_tokenizer, composing_tokenizer]
UNBOUNDED = [wordpiece_tokenizer, dropping_tokenizer, splitting_tokenizer]


@pytest.mark.parametrize("make", BOUNDED + UNBOUNDED)
def test_only_where_no_text_is_dropped_bytes_tell_the_least_number_of_tokens(
    make: Callable[[], FastTokenizer],
) -> None:
    assert (Tokenizer(make()).longest_token is not None) == (make in BOUNDED)


@pytest.mark.parametrize("make", BOUNDED + UNBOUNDED)
def test_no_text_has_fewer_tokens_than_is_said(make: Callable[[], FastTokenizer]) -> None:
    tokenizer = Tokenizer(make())
    parts = st.sampled_from(
        [
            "the quick ",
            " " * 50,
            "日本語",
            "\u1100\u1161\u11a8",
            "s\u0323\u0307",
            "hello world",
            "😀",
            "a",
            "\n",
        ]
    )
    texts = st.lists(parts, max_size=200).map("".join)

    @given(texts, st.integers(1, 50))
    def check(text: str, most: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PIECE_CHARS", 64)
            if (least := tokenizer.at_least(text, most)) is not None:
                assert most < least <= len(tokenizer.encode([text], add_special_tokens=False)[0])

    check()


@pytest.mark.parametrize("make", BOUNDED)
def test_the_ending_has_the_same_last_tokens(make: Callable[[], FastTokenizer]) -> None:
    tokenizer = Tokenizer(make())
    text = "the quick brown fox, naïve 日本語 and \n 12345 again " * 20_000
    (whole,) = tokenizer.encode([text], add_special_tokens=True)
    ending = tokenizer.part(text, 700)
    assert len(ending) < len(text) / 2
    (tokens,) = tokenizer.encode([ending], add_special_tokens=True)
    assert tokens[-700:] == whole[-700:]


@pytest.mark.parametrize("size", [60_000, 1_000_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_prompt_that_cannot_fit_is_refused_by_its_bytes(
    http: httpx.AsyncClient, model: ServedModel, monkeypatch: pytest.MonkeyPatch, path: str, size: int
) -> None:
    """Small bodies on a thread here, large ones in the readers' process."""
    monkeypatch.setattr(module, "PIECE_CHARS", 1 << 10)
    encoded: list[Any] = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts, **_: encoded.append(texts))
    text = "the quick brown fox " * (size // 20)
    body = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    refused = await http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (
        f"maximum context length is {MAX_MODEL_LEN} tokens, but your prompt has at least"
        in refused.json()["error"]["message"]
    )
    assert encoded == []


async def test_a_long_prompt_may_be_truncated(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    text = "the quick brown fox jumps " * 20_000
    body = {"prompt": text, "truncate_prompt_tokens": 100, "max_tokens": 1}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    (whole,) = model.tokenizer.encode([text], add_special_tokens=True)
    assert list(dispatcher.requests[0].prompt_token_ids) == whole[-100:]


async def test_limits_are_asked_before_a_prompt_is_tokenized(
    tmp_path: Path, dispatcher: FakeDispatcher, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TenantStore(tmp_path / "tenants", create=True)
    store.set_tenant("acme")
    key = store.create_key("acme", limits={"requests_per_minute": 3, "tokens_per_minute": 1000}).key
    store.close()
    limiter = SharedLimiter(tmp_path / "limits", clock=lambda: 1e9)
    server = HttpServer(
        HttpApp(dispatcher, model, AppParts(tenancy=Tenancy(KeyDirectory(tmp_path / "tenants"), limiter)))
    )
    await server.start()
    prepared: list[Any] = []
    prepare, read = server.app.generation._planners["tiny"].plan, server.app.generation.reader.read

    def counted(*arguments: Any) -> Any:
        prepared.append(arguments)
        return prepare(*arguments)

    async def counted_read(*arguments: Any) -> Any:
        prepared.append(arguments)
        return await read(*arguments)

    monkeypatch.setattr(server.app.generation._planners["tiny"], "plan", counted)
    monkeypatch.setattr(server.app.generation.reader, "read", counted_read)
    long = {"prompt": "the quick brown fox " * 200, "max_tokens": 1}  # more tokens than the key has
    large = {"prompt": "the quick brown fox " * 5000, "max_tokens": 1}  # than the context has
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, headers=headers, timeout=60
    ) as client:
        fits = await client.post(
            "/v1/completions", json={"prompt": "the quick brown fox " * 30, "max_tokens": 1}
        )
        assert fits.status_code == 200
        assert fits.headers["x-ratelimit-remaining-requests"] == "2"
        assert int(fits.headers["x-ratelimit-remaining-tokens"]) < 1000 - 60
        answers = [await client.post("/v1/completions", json=body) for body in (long, large, long, large)]
    assert [answer.status_code for answer in answers] == [429, 400, 429, 429]
    assert "is taken for" in answers[0].json()["error"]["message"]
    assert len(prepared) == 3
    await server.stop(grace_s=0)
    await limiter.stop()
    await asyncio.sleep(0)
