"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json: byte-level BPE ("gpt2") and
SentencePiece's BPE with byte fallback ("llama")."""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelConfigError
from .file import GgufFile

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*END"
GROUPS_OF_3 = rf"{SUFFIXES}|{LETTERS}|\p{{N}}{{1,3}}|{SIGNS}|{REST}"
SINGLE_DIGITS = rf"{SUFFIXES}|{LETTERS}|\p{{N}}|{SIGNS}|{REST}"
TEKKEN = rf"{BY_CASE.replace('END', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
GPT_4O = rf"{BY_CASE.replace('END', f'{SUFFIXES}?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
GPT_2, GPT_2_DIGITS = "", r"\p{N}"  # ByteLevel's own pattern, after single digits
PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), GROUPS_OF_3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), GROUPS_OF_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), SINGLE_DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "granite-docling"), GPT_2),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r", "codeshell"), GPT_2_DIGITS),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT_4O),
}
"""How a text is split before BPE, by ``tokenizer.ggml.pre``."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken", "chatglm-bpe")
"""A word that is a token is taken without merges."""
COMPOSED = ("qwen2", "deepseek-r1-qwen", "megrez")  # Unicode, NFC
# unless the metadata decides
BEGIN_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
SPECIALS = ("bos", "eos", "unknown", "padding", "seperator", "mask")  # gguf spells one so
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "mask_token")
PLAIN_OF_PHI_3 = ("<unk>", "<s>", "<|endoftext|>")  # spaces after its other special tokens are theirs
SPACE = "▁"


class Kind(IntEnum):
    """A token's type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """Raises ModelConfigError."""
    model, tokens = file.get("tokenizer.ggml.model", "none"), file.get("tokenizer.ggml.tokens", [])
    types = file.get("tokenizer.ggml.token_type") or [Kind.NORMAL] * len(tokens)
    if model not in ("gpt2", "llama") or len(types) != len(tokens):
        raise _refused(file, f"tokenizer {model!r:.100} is not supported (supported: gpt2, llama)")
    vocab = {token: i for i, token in reversed(list(enumerate(tokens))) if types[i] != Kind.UNUSED}
    pre = str(file.get("tokenizer.ggml.pre", "default"))
    try:
        made = _byte_level(file, vocab, pre) if model == "gpt2" else _sentencepiece(file, vocab, types)
    except ModelConfigError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise _refused(file, f"its tokenizer cannot be made ({error!s:.200})") from error
    padded = file.architecture == "phi3" and model == "llama"
    plain = model == "llama" and not file.get("tokenizer.ggml.add_space_prefix", True)
    for i, token in enumerate(tokens):
        if types[i] in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN):
            special = types[i] != Kind.USER_DEFINED
            strip = padded and token not in PLAIN_OF_PHI_3
            made.add_tokens(
                [AddedToken(token, special=special, rstrip=strip, normalized=plain and not special)]
            )
    _add_ends(file, made, tokens, model == "llama" or pre in BEGIN_WITH_BOS)
    return made


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json, without the chat template."""
    tokens = file.get("tokenizer.ggml.tokens", [])
    ids = {
        name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in zip(NAMES, SPECIALS, strict=True)
    }
    named = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **named}


def _byte_level(file: GgufFile, vocab: dict[str, int], pre: str) -> Tokenizer:
    if pre not in PATTERNS:
        raise _refused(
            file, f"the pre-tokenizer {pre!r:.100} is not supported (supported: {', '.join(PATTERNS)})"
        )
    pairs = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", [])]
    merges = [pair for pair in pairs if len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys()]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS))
    if pre in COMPOSED:
        made.normalizer = normalizers.NFC()
    pattern, own = PATTERNS[pre], PATTERNS[pre] in (GPT_2, GPT_2_DIGITS)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(file: GgufFile, vocab: dict[str, int], types: list[int]) -> Tokenizer:
    """SentencePiece merges the neighbours whose token has the highest score: merges in that order."""
    scores = file.get("tokenizer.ggml.scores", [])
    ranked = sorted(
        (token for token, i in vocab.items() if types[i] in (Kind.NORMAL, Kind.USER_DEFINED)),
        key=lambda token: -scores[vocab[token]],
    )
    merges = chain.from_iterable(_halves(token, vocab) for token in ranked)
    unknown = next((token for token, i in vocab.items() if types[i] == Kind.UNKNOWN), None)
    made = Tokenizer(models.BPE(vocab, list(merges), byte_fallback=True, fuse_unk=True, unk_token=unknown))
    to_spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        made.decoder = decoders.Sequence([*to_spaces, decoders.Strip(" ", 1, 0)])
    else:
        made.normalizer = normalizers.Replace(" ", SPACE)
        made.decoder = decoders.Sequence(to_spaces)
    return made


def _halves(token: str, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that make this one, those that are older first."""
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    there = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    return sorted(there, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def _add_ends(file: GgufFile, made: Tokenizer, tokens: list[str], default_bos: bool) -> None:
    """The tokens that are put before and after a text."""
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    wanted = {"bos": file.get("tokenizer.ggml.add_bos_token", default_bos),
              "eos": file.get("tokenizer.ggml.add_eos_token", False)}  # fmt: skip
    named = {name: tokens[i] for name, i in ids.items() if i is not None and wanted[name] and i < len(tokens)}
    if not named:
        return
    made.post_processor = processors.TemplateProcessing(
        single=[
            *([named["bos"]] if "bos" in named else []),
            "$A",
            *([named["eos"]] if "eos" in named else []),
        ],
        special_tokens=[(token, ids[name]) for name, token in named.items()],
    )


def _refused(file: GgufFile, reason: str) -> ModelConfigError:
    return ModelConfigError(
        f"{file.path}: {reason}; put the tokenizer.json of the model that it was made from beside it"
    )
