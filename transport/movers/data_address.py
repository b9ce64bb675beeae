"""Where a decode worker takes KV blocks in, and what a peer needs to be let in: one string, which travels over the encrypted control
channel only.

    tcp://host:port#<secret, 64 hex digits>          blocks travel encrypted
    tcp://host:port#<secret, 64 hex digits>#plain    the decode worker would also take them in the clear (--plaintext-kv)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..errors import MoverError

SECRET_BYTES = 32
_TCP = re.compile(r"tcp://(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:\[\]#]+)):(?P<port>\d{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class DataAddress:
    host: str
    port: int
    secret: bytes = field(repr=False)
    takes_plain: bool

    def __str__(self) -> str:
        """As it travels. Confidential."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}#{self.secret.hex()}" + ("#plain" if self.takes_plain else "")

    @classmethod
    def parse(cls, text: str) -> DataAddress:
        """Raises MoverError, without the secret in its words."""
        address, *rest = text.split("#")
        end = endpoint(address)
        try:
            secret = bytes.fromhex(rest[0])
        except (IndexError, ValueError):
            secret = b""
        if end is None or not end[1] or len(secret) != SECRET_BYTES or rest[1:] not in ([], ["plain"]):
            raise MoverError(f"cannot connect to {address} for KV blocks: expected tcp://host:port and a secret")
        return cls(*end, secret, rest[1:] == ["plain"])


def endpoint(address: str) -> tuple[str, int] | None:
    """(host, port) of tcp://host:port; port * is 0; None where ``address`` is none."""
    match = _TCP.fullmatch(address)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65_535):
        return None
    return match["v6"] or match["host"], 0 if match["port"] == "*" else int(match["port"])
