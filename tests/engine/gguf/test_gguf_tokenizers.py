"""A tokenizer that comes out of GGUF metadata is the one that went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from support.gguf_checkpoints import add_tokenizer_of
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import generate_merges

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.gguf.file import GgufFile
from splitserve.engine.gguf.tokenizer import tokenizer_config_of, tokenizer_of

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + SUFFIX
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + SUFFIX
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "Hello world",
    " leading and trailing  ",
    "I'll say: it's DON'T, we'Ve 12345678 and 3.14159!",
    "def f(x):\n\treturn x  ** 2\n\n\n# done\r\n",
    "naïve café, cafe\u0301 Übergröße ÅNGSTRÖM A\u030angstro\u0308m",
    "日本語のテキスト、中文文本和한국어",
    "😀👩‍👩‍👧 emoji… “quotes” — dash",
    "مرحبا بالعالم नमस्ते दुनिया",
    "   \n \n\t \n  x",
    "<|im_start|>user\nHi<|im_end|> there<tool>a</tool><|im_end|>",
    "CamelCaseHTTPServer2Go/path/to//file\n/x",
    "a\u00a0b\u2003c\u3000d",
    "",
)
SPECIAL, PLAIN = ["<|im_start|>", "<|im_end|>"], ["<tool>", "</tool>"]


def corpus() -> list[str]:
    words = " ".join(Path(__file__).read_text().split())
    return [*TEXTS, *([words] * 3), "the quick brown fox isn't the Quick BROWN fox 1234567890 " * 20]


def byte_level(pattern: str, digits: bool, nfc: bool, whole_words: bool) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=whole_words))
    if nfc:
        made.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    splits += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(SPECIAL)
    made.add_tokens(PLAIN)
    return made


def read(folder: Path, writer: gguf.GGUFWriter) -> GgufFile:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(folder / "a.gguf")


def assert_same(found: Tokenizer, expected: Tokenizer) -> None:
    for text in [*TEXTS, *corpus()]:
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids, text
        for special in (True, False):
            assert found.decode(ids, skip_special_tokens=special) == expected.decode(
                ids, skip_special_tokens=special
            )


@pytest.mark.parametrize(
    ("pre", "pattern", "digits", "nfc", "whole_words"),
    [
        ("llama-bpe", LLAMA_3, False, False, True),
        ("dbrx", LLAMA_3, False, False, False),
        ("glm4", LLAMA_3, False, False, False),
        ("qwen2", QWEN_2, False, True, False),
        ("tekken", TEKKEN, False, False, True),
        ("gpt-4o", GPT_4O, False, False, False),
        ("gpt-2", "", False, False, False),
        ("smollm", "", True, False, False),
    ],
)
def test_byte_level_bpe(
    tmp_path: Path, pre: str, pattern: str, digits: bool, nfc: bool, whole_words: bool
) -> None:
    expected = byte_level(pattern, digits, nfc, whole_words)
    expected.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    add_tokenizer_of(writer, tmp_path, pre)
    file = read(tmp_path, writer)
    assert tokenizer_config_of(file)["eos_token"] == "<|im_end|>"
    assert_same(tokenizer_of(file), expected)


def sentencepiece(prefix: bool) -> tuple[Tokenizer, list[float]]:
    """A tokenizer as transformers converts one, and the scores of its tokens."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    scheme = "always" if prefix else "never"
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    vocab = trained.get_vocab()
    merged = len(tokens) + sum(len(token) == 1 for token in vocab)
    scores = [0.0 if i < len(tokens) else -float(i - merged) for i in range(len(vocab))]
    single = {token: i for token, i in vocab.items() if i >= len(tokens)}
    merges = generate_merges(single, {token: scores[i] for token, i in single.items()})
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    joined: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    made.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)] if prefix else joined)
    made.add_special_tokens(["<unk>", "<s>", "</s>", *SPECIAL])
    made.add_tokens([AddedToken(token, normalized=not prefix) for token in PLAIN])
    return made, scores


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    expected, scores = sentencepiece(prefix)
    tokens = sorted(expected.get_vocab(), key=expected.get_vocab().__getitem__)
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    types += [kinds.NORMAL] * (len(scores) - len(types)) + [kinds.CONTROL] * 2 + [kinds.USER_DEFINED] * 2
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, "[PAD]"])
    writer.add_token_scores([*scores, *[-1000.0] * (len(tokens) + 1 - len(scores))])
    writer.add_token_types([*types, kinds.UNUSED])
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(prefix)
    found = tokenizer_of(read(tmp_path, writer))
    assert [found.token_to_id("<s>"), *found.encode("", add_special_tokens=False).ids] == found.encode("").ids
    found.post_processor = None
    assert_same(found, expected)


def test_what_is_put_before_and_after_a_text(tmp_path: Path) -> None:
    byte_level(LLAMA_3, False, False, True).save(str(tmp_path / "tokenizer.json"))
    settings = '{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}'
    (tmp_path / "tokenizer_config.json").write_text(settings)
    for pre, ends, expected in (
        ("llama-bpe", {}, "<|im_start|>Hi"),
        ("llama-bpe", {"bos": False}, "Hi"),
        ("qwen2", {}, "Hi"),
        ("qwen2", {"bos": True, "eos": True}, "<|im_start|>Hi<|im_end|>"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        add_tokenizer_of(writer, tmp_path, pre)
        for name, value in ends.items():
            writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)
        found = tokenizer_of(read(tmp_path, writer))
        assert found.decode(found.encode("Hi").ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("model", "pre", "answer"),
    [
        ("bert", "default", "tokenizer 'bert' is not supported"),
        ("gpt2", "viking", "pre-tokenizer 'viking' is not supported .supported: llama-bpe"),
    ],
)
def test_other_tokenizers_are_refused_with_advice(tmp_path: Path, model: str, pre: str, answer: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a"])
    writer.add_token_types([1])
    with pytest.raises(ModelConfigError, match=f"{answer}.*put the tokenizer.json of the model"):
        tokenizer_of(read(tmp_path, writer))
