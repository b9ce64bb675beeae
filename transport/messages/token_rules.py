"""Tokens that an output may or may not have. They travel in the field of its grammar."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.json import decode, encode

PREFIX = b"token-rules:"
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class TokenRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules beside the grammar, which may be empty."""

    allowed: tuple[TokenId, ...] = ()  # empty: all
    bad: tuple[tuple[TokenId, ...], ...] = ()  # runs of tokens that must not occur
    grammar: str = ""

    def packed(self) -> bytes:
        """Return a value of ``SamplingParams.grammar``."""
        return PREFIX + encode(self) if self.allowed or self.bad else self.grammar.encode()

    @classmethod
    def unpacked(cls, grammar: bytes) -> TokenRules:
        """Return the rules of a ``SamplingParams.grammar``. Raises msgspec.ValidationError."""
        if not grammar.startswith(PREFIX):
            return cls(grammar=grammar.decode())
        return decode(grammar.removeprefix(PREFIX), type=cls)
