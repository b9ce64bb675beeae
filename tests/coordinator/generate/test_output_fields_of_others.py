"""Fields of other servers' APIs about the output."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from support.asked_fields import BOTH, CHAT, TEXT, Asked
from support.http_fakes import ANSWER, FakeDispatcher, logprobs, wordpiece_tokenizer
from support.tool_answers import Answering

from splitserve.coordinator.chat_output.markers import StopStrings
from splitserve.coordinator.generate import formats
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.coordinator.text.tokenizer import Tokenizer
from splitserve.transport.messages.token_rules import TokenRules


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
    dispatcher.eos, _ = model.tokenizer.fast.encode("ÿ", add_special_tokens=False).ids  # half a character
    assert await asked.text(path, body, stop_token_ids=[dispatcher.eos]) == ANSWER


async def test_an_end_token_is_not_shown_where_its_tokenizer_has_it_as_text(
    answering: Answering, model: ServedModel
) -> None:
    (end,) = model.tokenizer.fast.encode("!", add_special_tokens=False).ids
    client, dispatcher = await answering("Hello.", of=replace(model, eos_token_ids=frozenset([end])))
    dispatcher.eos = end
    answer = await client.completions.create(model="tiny", prompt="Hi", temperature=0)
    assert answer.choices[0].text == "Hello."


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


async def test_offsets_beside_bytes_that_are_no_text(answering: Answering, model: ServedModel) -> None:
    """A token after such bytes had the offset of their U+FFFD, and was shown though a stop string cut it."""
    pieces = (b"A", b"\xe2", b"\x82", b"B", b"\xe2", b"\x82", b"\xac", b"C", b"\xff", b"D")
    ids = [model.tokenizer.table.pieces.index(piece) for piece in pieces]
    client, _ = await answering(ids, of=replace(model, eos_token_ids=frozenset()))
    body: Any = {"model": "tiny", "prompt": ids, "logprobs": 0, "echo": True, "max_tokens": len(ids)}
    (choice,) = (await client.completions.create(**body)).choices
    assert choice.text == 2 * "A\ufffdB€C\ufffdD"
    offsets = [0, 1, 1, 2, 3, 3, 3, 4, 5, 6]
    assert choice.logprobs.text_offset == [*offsets, *(7 + offset for offset in offsets)]
    (choice,) = (await client.completions.create(**body, stop="B")).choices
    assert choice.text == "A\ufffdB€C\ufffdDA\ufffd"
    assert len(choice.logprobs.tokens) == len(ids) + 3


async def test_offsets_of_words_that_join_with_a_space(answering: Answering, model: ServedModel) -> None:
    """The space belongs to the token that it comes with, though the token alone has none."""
    words = Tokenizer(wordpiece_tokenizer())
    client, _ = await answering([1, 2, 3], of=replace(model, tokenizer=words, eos_token_ids=frozenset()))
    body: Any = {"model": "tiny", "prompt": "play", "logprobs": 0, "max_tokens": 3}
    (choice,) = (await client.completions.create(**body)).choices
    assert choice.text == " hello worlds"
    assert choice.logprobs.text_offset == [0, 6, 12]
