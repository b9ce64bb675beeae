"""Incremental text equals the decode of all tokens; stop strings never show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_fakes import byte_level_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders

from splitserve.coordinator.chat_output.markers import StopStrings
from splitserve.coordinator.text.detokenizer import (
    MarkedDetokenizer,
    StreamDetokenizer,
    TableDetokenizer,
    make_detokenizer,
)
from splitserve.coordinator.text.token_table import TokenTable


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Added tokens are spelled as they are: also where a letter happens to stand for a byte."""
    tokenizer.add_tokens(
        [
            AddedToken("<think>", special=False),
            AddedToken("né e", special=False),
            AddedToken("é", special=False),
        ]
    )
    return tokenizer


def without_table(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


PLAIN = byte_level_tokenizer()
BYTES_WITHOUT_TABLE = without_table(byte_level_tokenizer())
BYTE_LEVEL = with_added_tokens(byte_level_tokenizer())
SENTENCEPIECE = sentencepiece_tokenizer()
SENTENCEPIECE.add_tokens([AddedToken("<call>")])  # normalized: with the space before it
SENTENCEPIECE.add_special_tokens([AddedToken("<end>", normalized=True, special=True)])
WORDPIECE = wordpiece_tokenizer()
TABLES = {id(t): TokenTable.of(t) for t in (PLAIN, BYTE_LEVEL, BYTES_WITHOUT_TABLE, SENTENCEPIECE, WORDPIECE)}


def incremental(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, TABLES[id(tokenizer)], prompt)
    return [*map(detokenizer.step, ids), detokenizer.finish()]


def token_ids(tokenizer: Tokenizer, **sizes: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), **sizes)


def test_tables_are_used_where_they_can_be() -> None:
    kinds = [type(make_detokenizer(t, TABLES[id(t)], [])) for t in (BYTE_LEVEL, SENTENCEPIECE, WORDPIECE)]
    assert kinds == [TableDetokenizer, TableDetokenizer, StreamDetokenizer]


@given(token_ids(BYTE_LEVEL, max_size=40))
def test_byte_level_equals_the_full_decode_for_any_tokens(ids: list[int]) -> None:
    assert "".join(incremental(BYTE_LEVEL, [0], ids)) == BYTE_LEVEL.decode(ids)


@given(st.text(max_size=40))
def test_no_half_character_is_shown(text: str) -> None:
    ids = PLAIN.encode(text, add_special_tokens=False).ids
    parts = incremental(PLAIN, [0], ids)
    assert "".join(parts) == PLAIN.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@given(
    st.text(st.sampled_from("hello world the ï世😀 "), min_size=1, max_size=30),
    st.text(st.sampled_from("the world"), max_size=8),
)
def test_sentencepiece_equals_the_full_decode(text: str, before: str) -> None:
    prompt = [1, *SENTENCEPIECE.encode(before).ids]
    ids = SENTENCEPIECE.encode(text).ids
    whole, head = SENTENCEPIECE.decode(prompt + ids), SENTENCEPIECE.decode(prompt)
    assert "".join(incremental(SENTENCEPIECE, prompt, ids)) == whole[len(head) :]


@given(token_ids(WORDPIECE, min_size=1, max_size=6), token_ids(WORDPIECE, max_size=20))
def test_other_tokenizers_equal_the_full_decode(prompt: list[int], ids: list[int]) -> None:
    whole, head = WORDPIECE.decode(prompt + ids), WORDPIECE.decode(prompt)
    text = "".join(incremental(WORDPIECE, prompt, ids))
    assert len(text) == len(whole) - len(head)
    assert whole.endswith(text)


def test_an_added_token_that_is_normalized_keeps_its_space() -> None:
    prompt, call = SENTENCEPIECE.encode("he").ids, SENTENCEPIECE.token_to_id("<call>")
    assert incremental(SENTENCEPIECE, prompt, [call])[0] == " <call>"
    end = SENTENCEPIECE.token_to_id("<end>")
    assert TABLES[id(SENTENCEPIECE)].token_bytes(end) == b"<end>"  # its name, whatever it takes in


def test_a_prompt_that_ends_within_a_character_is_not_told_again() -> None:
    """Its last tokens came out once more, or a step failed, where the tokenizer has no table."""
    tokenizer = BYTES_WITHOUT_TABLE
    first, second = tokenizer.encode("ÿ", add_special_tokens=False).ids
    prompt = [*tokenizer.encode("hello").ids, first]
    (space,) = tokenizer.encode(" the", add_special_tokens=False).ids
    assert "".join(incremental(tokenizer, prompt, [space])) == " the"
    assert "".join(incremental(tokenizer, [space], [first, second, first, space])) == "ÿ\ufffd the"


def test_half_a_character_before_a_special_token_is_told_once() -> None:
    for tokenizer in (PLAIN, BYTES_WITHOUT_TABLE):
        first, _ = tokenizer.encode("ÿ", add_special_tokens=False).ids
        (the,) = tokenizer.encode(" the", add_special_tokens=False).ids
        end = tokenizer.token_to_id("<|end|>")
        inner = make_detokenizer(tokenizer, TABLES[id(tokenizer)], [the])
        detokenizer = MarkedDetokenizer(inner, {end: "<|end|>"})
        parts = [*map(detokenizer.step, [first, end, the]), detokenizer.finish()]
        assert "".join(parts) == "\ufffd<|end|> the"


def test_unknown_ids_are_empty() -> None:
    table = TokenTable.of(BYTE_LEVEL, 5000)
    detokenizer = make_detokenizer(BYTE_LEVEL, table, [0])
    assert detokenizer.step(4999) == ""


letters = st.text("ab\n", min_size=1, max_size=4)


@given(st.lists(letters, min_size=1, max_size=3), st.lists(st.text("abc\n", max_size=5), max_size=20))
def test_stop_strings_cut_at_the_first_and_never_show(stops: list[str], parts: list[str]) -> None:
    stopper, shown, fed = StopStrings(stops), "", ""
    for part in parts:
        fed += part
        shown += stopper.feed(part)
        assert fed.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if stopper.matched:
            break
        # nothing is shown that may yet be part of a stop string, and nothing else is kept
        assert not any(
            fed.endswith(stop[:n]) and len(fed) - n < len(shown)
            for stop in stops
            for n in range(1, len(stop))
        )
    first = [fed.index(stop) for stop in stops if stop in fed]
    if first:
        assert stopper.matched
        assert shown == fed[: min(first)]
    else:
        assert shown + stopper.finish() == fed


@pytest.mark.parametrize("stop", ["ab", "世界", "end"])
def test_a_stop_string_that_spans_tokens(stop: str) -> None:
    stopper = StopStrings([stop])
    shown = "".join(stopper.feed(character) for character in f"x{stop[0]}{stop}y")
    assert shown == f"x{stop[0]}"
    assert stopper.matched
