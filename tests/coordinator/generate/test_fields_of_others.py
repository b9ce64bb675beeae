"""Fields that OpenAI does not have, named as vLLM names them."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import orjson
import pytest
from support.http_fakes import ANSWER, MAX_MODEL_LEN, FakeDispatcher, logprobs

from splitserve.coordinator.generate import formats
from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.tenants.limits import salt_of
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.coordinator.text.stop_strings import StopStrings
from splitserve.transport.messages.token_rules import TokenRules

USER = {"role": "user", "content": "Hi"}
HALF = {"role": "assistant", "content": "The opposite of big is "}
CHAT = "/v1/chat/completions", {"messages": [USER], "temperature": 0}
TEXT = "/v1/completions", {"prompt": "Hi", "temperature": 0, "max_tokens": 500}
BOTH = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])


class Asked:
    """Posts bodies, and shows the prompt that the workers got."""

    def __init__(self, http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel) -> None:
        self._http, self._dispatcher, self._model = http, dispatcher, model

    async def answer(self, path: str, body: dict[str, Any], **more: Any) -> Any:
        response = await self._http.post(path, json={**body, **more})
        assert response.status_code == 200, response.text
        return response.json()

    async def refusal(self, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        response = await self._http.post(path, json={**body, **more})
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    async def chunks(self, path: str, body: dict[str, Any], **more: Any) -> list[Any]:
        response = await self._http.post(path, json={**body, **more, "stream": True})
        return [orjson.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]

    async def text(self, path: str, body: dict[str, Any], **more: Any) -> str:
        """Return the answer's text, which is the same in a stream."""
        choice = (await self.answer(path, body, **more))["choices"][0]
        whole: str = choice["message"]["content"] if "message" in choice else choice["text"]
        pieces = [c for chunk in await self.chunks(path, body, **more) for c in chunk["choices"]]
        texts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in pieces]
        assert "".join(texts) == whole
        return whole

    async def prompt(self, path: str, body: dict[str, Any], **more: Any) -> str:
        """The prompt as text, special tokens included."""
        await self.answer(path, body, **more)
        return self._model.tokenizer.decode(self.last.prompt_token_ids)

    @property
    def last(self) -> Any:
        return self._dispatcher.requests[-1]


@pytest.fixture
def asked(http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel) -> Asked:
    return Asked(http, dispatcher, model)


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


# --- the output -----------------------------------------------------------------------------------


@BOTH
async def test_what_has_stopped_the_answer_is_shown(asked: Asked, path: str, body: dict[str, Any]) -> None:
    assert await asked.text(path, body, stop=["fox"]) == ANSWER[: ANSWER.index("fox")]
    whole = ANSWER[: ANSWER.index("fox") + 3]
    assert await asked.text(path, body, stop=["fox", "dog"], include_stop_str_in_output=True) == whole
    assert await asked.text(path, body, include_stop_str_in_output=True) == ANSWER


@BOTH
async def test_special_tokens_of_the_output_are_written_out(
    asked: Asked, dispatcher: FakeDispatcher, path: str, body: dict[str, Any]
) -> None:
    script = dispatcher.script
    dispatcher.script = lambda request: [*script(request), 2, 5]
    shown = f"{ANSWER}<|user|><|end|>"
    assert await asked.text(path, body) == ANSWER
    assert await asked.text(path, body, skip_special_tokens=False) == shown
    with_end = await asked.text(path, body, skip_special_tokens=False, include_stop_str_in_output=True)
    assert with_end == f"{shown}<|eos|>"


@BOTH
async def test_a_token_that_stops_the_answer_is_not_shown(
    asked: Asked, dispatcher: FakeDispatcher, model: ServedModel, path: str, body: dict[str, Any]
) -> None:
    last = model.tokenizer.fast.encode("!", add_special_tokens=False).ids
    dispatcher.eos = last[0]
    assert await asked.text(path, body, stop_token_ids=last) == ANSWER
    assert await asked.text(path, body, stop_token_ids=last, include_stop_str_in_output=True) == f"{ANSWER}!"


def test_an_included_stop_string_is_cut_behind_its_first_end() -> None:
    for stops, shown in ((["bc"], "abc"), (["bcd", "bc"], "abc"), (["cd", "abcd"], "abcd")):
        strings = StopStrings(stops, included=True)
        assert "".join(strings.feed(letter) for letter in "abcdef") == shown


@BOTH
async def test_log_probabilities_name_tokens_by_id(asked: Asked, path: str, body: dict[str, Any]) -> None:
    of_chat = path == CHAT[0]
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if of_chat else {"logprobs": 2}
    found = (await asked.answer(path, body, **more, return_tokens_as_token_ids=True, return_token_ids=True))[
        "choices"
    ][0]
    names = [f"token_id:{token_id}" for token_id in found["token_ids"]]
    if of_chat:
        assert [entry["token"] for entry in found["logprobs"]["content"]] == names
        alternatives = found["logprobs"]["content"][0]["top_logprobs"]
        assert all(entry["token"].startswith("token_id:") for entry in alternatives)
    else:
        assert found["logprobs"]["tokens"] == names
        assert all(name.startswith("token_id:") for name in found["logprobs"]["top_logprobs"][0])


@BOTH
async def test_log_probabilities_of_chosen_tokens(
    asked: Asked, model: ServedModel, path: str, body: dict[str, Any]
) -> None:
    of_chat = path == CHAT[0]
    more: dict[str, Any] = {"logprobs": True} if of_chat else {"logprobs": 0}
    wanted = {"logprob_token_ids": [70, 300], "return_tokens_as_token_ids": True}
    found = (await asked.answer(path, body, **more, **wanted))["choices"][0]["logprobs"]
    assert asked.last.sampling.logprob_token_ids == (70, 300)
    if of_chat:
        for entry in found["content"]:
            alternatives = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
            assert alternatives == [("token_id:70", -71.0), ("token_id:300", -301.0)]
    else:
        assert all(top["token_id:70"] == -71.0 for top in found["top_logprobs"])
    for bad in ({}, {**more, "top_logprobs" if of_chat else "logprobs": 2}):
        assert (await asked.refusal(path, body, **bad, logprob_token_ids=[70]))["message"].startswith(
            "logprob_t"
        )
    error = await asked.refusal(path, body, **more, logprob_token_ids=[70, model.vocab_size])
    assert error["param"] == "logprob_token_ids"
    assert (await asked.refusal(path, body, **more, logprob_token_ids=list(range(21))))["param"]


@BOTH
async def test_log_probabilities_of_the_prompt(
    asked: Asked, model: ServedModel, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, threads = formats.prompt_logprob, set[int]()

    def noted(*arguments: Any) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return written(*arguments)

    monkeypatch.setattr(formats, "prompt_logprob", noted)
    answer = await asked.answer(path, body, prompt_logprobs=2)
    assert threads
    assert threading.get_ident() not in threads, "the event loop goes on while a long prompt's are written"
    found = (answer if path == CHAT[0] else answer["choices"][0])["prompt_logprobs"]
    ids = list(asked.last.prompt_token_ids)
    assert asked.last.prompt_logprobs == 2
    assert len(found) == len(ids)
    assert found[0] is None
    for token_id, entry in zip(ids[1:], found[1:], strict=True):
        expected = logprobs(token_id, 2)
        own = entry[str(token_id)]
        assert own["decoded_token"] == model.tokenizer.decode([token_id])
        assert {int(other) for other in entry} == {token_id, *expected.top_ids}
        assert own["rank"] in (1, None)
    assert (await asked.refusal(path, body, prompt_logprobs=2, stream=True))["param"] == "prompt_logprobs"
    assert "prompt_logprobs" not in (await asked.answer(path, body))["choices"][0]


async def test_the_prompts_log_probabilities_beside_echo(asked: Asked) -> None:
    path, body = TEXT
    ids = [2, *range(40, 50), 5]
    answer = await asked.answer(path, body, prompt=ids, prompt_logprobs=3, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert asked.last.prompt_logprobs == 3
    assert [entry and len(entry) for entry in choice["prompt_logprobs"]] == [None] + [4] * (len(ids) - 1)
    assert {len(entry) for entry in choice["logprobs"]["top_logprobs"][1 : len(ids)]} <= {1, 2}


async def test_an_echo_of_token_ids_has_their_special_tokens(asked: Asked, model: ServedModel) -> None:
    path, body = TEXT
    ids = [2, *model.tokenizer.fast.encode("a fox", add_special_tokens=False).ids, 5]
    answer = await asked.answer(path, body, prompt=ids, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == f"<|user|>a fox<|end|>{ANSWER}"
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert [choice["text"][at:].startswith(token) for at, token in zip(offsets, tokens, strict=True)][:5]
    literal = "<|user|>a fox"
    choice = (await asked.answer(path, body, prompt=literal, echo=True, logprobs=0))["choices"][0]
    assert choice["logprobs"]["tokens"][:2] == ["<|bos|>", "<|user|>"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 0, len("<|user|>")]


@BOTH
async def test_rules_about_tokens_go_to_the_workers(
    asked: Asked, model: ServedModel, path: str, body: dict[str, Any]
) -> None:
    await asked.answer(path, body, allowed_token_ids=[7, 9], bad_words=["fox"], guided_choice=["a"])
    rules = TokenRules.unpacked(asked.last.sampling.grammar)
    assert rules.allowed == (7, 9)
    assert [model.tokenizer.decode(run) for run in rules.bad] == ["fox", " fox"]
    assert '"a"' in rules.grammar
    await asked.answer(path, body, allowed_token_ids=[], bad_words=[])
    assert asked.last.sampling.grammar == b""
    for wrong, name in (
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"allowed_token_ids": [5], "min_tokens": 1}, "min_tokens"),
    ):
        assert (await asked.refusal(path, body, **wrong))["param"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_grammar", 'root ::= "yes" | no\nno ::= "no"'),
        ("ebnf", 'root ::= [a-z]+ ("!" | "?")*'),
        ("grammar", 'root ::= "yes"{2,3}'),
        ("grammar", 'start: "yes"'),
        ("structured_outputs", {"grammar": 'root ::= "yes"'}),
        ("regex", "[a-z]+"),
        ("json_schema", {"type": "object"}),
        ("json_schema", '{"type": "object"}'),
    ],
)
@BOTH
async def test_formats_in_the_spellings_of_others(
    asked: Asked, path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    await asked.answer(path, body, **{name: value})
    assert asked.last.sampling.grammar
    error = await asked.refusal(path, body, **{name: value}, guided_choice=["a"])
    assert "not allowed together" in error["message"]


@pytest.mark.parametrize("text", ["root ::= missing", 'root ::= "a', "root ::= " + "(" * 5000, "a ::= b"])
@BOTH
async def test_a_grammar_that_cannot_be_read_is_refused(
    asked: Asked, path: str, body: dict[str, Any], text: str
) -> None:
    assert (await asked.refusal(path, body, ebnf=text))["param"] == "ebnf"


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
