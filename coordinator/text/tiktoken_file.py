"""A checkpoint's ``tiktoken.model`` as the tokenizer.json that all readers here want: Kimi's have no other.

A line of the file is a token's bytes, in base64, and its rank. What is mergeable follows from that: any two
neighbours that make a token together, those of the lowest rank first (byte-pair encoding; Sennrich et al.,
Neural machine translation of rare words with subword units, 2016).
"""

from __future__ import annotations

import os
from binascii import Error, a2b_base64
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from .tokenizer import read_json

NAME = "tiktoken.model"
MOST_BYTES = 64 << 20
NUM_SPECIAL = 256
UPPER, LOWER = (
    rf"[\p{{L{first}}}{second}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]"
    for first, second in (("u", r"\p{Lt}"), ("l", ""))
)
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    )
)  # fmt: skip
"""How Kimi's tokenizers cut a text before pairs are merged."""


def write_tokenizer(folder: Path) -> bool:
    """Write tokenizer.json beside ``tiktoken.model`` where the folder has this alone; return whether it did.
    Raises ValueError with a sentence, or OSError."""
    to, file = folder / "tokenizer.json", folder / NAME
    if to.exists() or not file.is_file():
        return False
    family = str(read_json(folder / "config.json").get("model_type", ""))
    if not family.startswith("kimi"):
        raise ValueError(
            f"{folder} has no tokenizer.json, and how a text of {family!r:.100} is cut for its {NAME} is not "
            "known; save the checkpoint with a fast tokenizer"
        )
    made = tokenizer_of(ranks_of(file), _special_tokens(folder))
    part = to.with_name(f".tokenizer.json.{os.getpid()}")
    try:
        made.save(str(part))
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)
    return True


def ranks_of(file: Path) -> dict[bytes, int]:
    """Return the rank of each token. Raises ValueError where there is anything else in the file."""
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(
            f"{file} is larger than the {MOST_BYTES} bytes that are read; is it what its name says?"
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[a2b_base64(token, strict_mode=True)] = int(rank)
        except (ValueError, Error) as error:
            raise ValueError(
                f"{file}: line {number} has no token in base64 and a rank; download it again"
            ) from error
    complete = {bytes([i]) for i in range(256)} <= ranks.keys()
    if not complete or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file}: it lacks ranks, or single bytes; download it again")
    return ranks


def tokenizer_of(ranks: dict[bytes, int], special_tokens: dict[int, str]) -> Tokenizer:
    """``special_tokens``: by id; the ids behind those of ``ranks``, ``NUM_SPECIAL`` of them, are special."""
    merges = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort()
    letters = _letters()
    shown = {token: token.decode("latin-1").translate(letters) for token in ranks}
    pairs = [(shown[merge[3]], shown[merge[4]]) for merge in merges]
    vocab = {shown[token]: rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocab, pairs, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    names = [
        special_tokens.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), len(ranks) + NUM_SPECIAL)
    ]
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return made


def _letters() -> dict[int, str]:
    """The letter that tokenizer.json has for each byte: those that are printed stand for themselves."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (i for i in range(256) if i not in shown)
    return {i: chr(i) for i in shown} | {i: chr(256 + place) for place, i in enumerate(others)}


def _special_tokens(folder: Path) -> dict[int, str]:
    """Raises ValueError."""
    named = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    try:
        return {int(i): str(token["content"]) for i, token in named.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must have tokens by their ids"
        ) from error
