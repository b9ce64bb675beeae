"""The tokenizer.json that is made of a tiktoken.model cuts and merges texts as tiktoken does."""

from __future__ import annotations

import json
from base64 import b64encode
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from splitserve.cli.config import ConfigError
from splitserve.cli.model_source import resolved
from splitserve.coordinator.text import tiktoken_file
from splitserve.coordinator.text.tiktoken_file import NAME, PATTERN, ranks_of, tokenizer_of
from splitserve.coordinator.text.tokenizer import Tokenizer as OwnTokenizer

WORDS = "aaaa aaa 我们今天学习人工智能，我们 HTTPServer's café 12345 \r\n\n"
TEXT = Path(tiktoken_file.__file__).read_text(encoding="utf-8") + WORDS * 20
PARTS = st.integers(0, len(TEXT) - 90).map(lambda i: TEXT[i : i + 90])
SPECIAL = {"[EOS]": 500 + 2, "<|im_end|>": 500 + 17}


@cache
def ranks() -> dict[bytes, int]:
    """500 tokens, the most frequent pairs of the text above joined one after the other."""
    found = {bytes([i]): i for i in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in TEXT.split(" ")]
    while len(found) < 500:
        counts: dict[bytes, int] = {}
        for word in words:
            for one, other in pairwise(word):
                counts[one + other] = counts.get(one + other, 0) + (one + other not in found)
        best = max(counts, key=lambda pair: (counts[pair], pair))
        found[best] = len(found)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == best:
                    word[i : i + 2] = [best]
                i += 1
    return found


@cache
def both() -> tuple[tiktoken.Encoding, Tokenizer]:
    names = {id: name for name, id in SPECIAL.items()}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens=SPECIAL)
    return encoding, tokenizer_of(ranks(), names)


LETTERS = st.text(alphabet=st.sampled_from("aAbz éÉßǅ我们的人工 \n\r\t'sS1²३.,-_🎉\u0301a"), max_size=60)


@settings(max_examples=300, deadline=None)
@given(st.one_of(LETTERS, st.text(max_size=60), PARTS))
def test_texts_have_the_tokens_that_tiktoken_gives_them(text: str) -> None:
    encoding, made = both()
    text = text.encode(errors="ignore").decode()
    tokens = made.encode(text, add_special_tokens=False).ids
    assert tokens == encoding.encode(text, disallowed_special=())
    assert made.decode(tokens) == text


def test_special_tokens_keep_their_ids() -> None:
    encoding, made = both()
    text = "a[EOS]b<|im_end|>"
    assert made.encode(text).ids == encoding.encode(text, allowed_special="all")
    assert made.token_to_id("<|reserved_token_755|>") == 755 == made.get_vocab_size() - 1


def write_folder(folder: Path, **config: object) -> None:
    lines = [b64encode(token) + b" %d" % rank for token, rank in ranks().items()]
    (folder / NAME).write_bytes(b"\n".join(lines) + b"\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2", **config}))
    named = {str(id): {"content": name} for name, id in SPECIAL.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))


def test_a_folder_without_a_tokenizer_gets_one(tmp_path: Path) -> None:
    """Once: what is there stays."""
    write_folder(tmp_path)
    assert resolved(str(tmp_path)) == tmp_path
    assert OwnTokenizer.load(tmp_path).encode(["我们[EOS]"], add_special_tokens=True)[0][-1] == 502
    (tmp_path / "tokenizer.json").write_text("{}")
    resolved(str(tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert {file.name for file in tmp_path.iterdir()} == {
        NAME, "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"model_type": "qwen"}', "how a text of 'qwen' is cut"),
        (NAME, "YQ== 0\nYQ", "line 2 has no token"),
        (NAME, "YQ== 0\n~ 1", "line 2 has no token"),
        (NAME, "YQ== 0", "it lacks ranks, or single bytes"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', "must have tokens by their ids"),
    ],
)
def test_what_cannot_be_read_is_refused(file: str, text: str, message: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolved(str(tmp_path))
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    write_folder(tmp_path)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"cannot write the tokenizer\.json .*Read-only file system"):
        resolved(str(tmp_path))


def test_too_large_a_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    monkeypatch.setattr(tiktoken_file, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="larger than the 100 bytes"):
        ranks_of(tmp_path / NAME)
