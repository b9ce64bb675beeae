"""``ModelRoute``: a name that stands for several models, each with a share of the conversations. Pure.

The share is weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables",
SPAA 2005): every model draws a number by its weight and the conversation's key, and the highest wins. It
depends on nothing else, so that all processes decide alike. Where a weight is raised, conversations move to
that model alone; where it is lowered, from that model alone. The order of the models does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log

DRAWS = 1 << 64


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """All names are the models' own."""

    name: str
    shares: Mapping[str, float]
    """Weights; at least one is above 0."""
    fallbacks: tuple[str, ...] = ()
    """In this order, where the model of the share can take nothing."""
    shadow: str = ""
    """Gets copies of requests; empty: there are none."""
    shadow_percent: float = 0.0
    main: str = field(init=False)
    """The model with the largest share, the first of several; it describes the route in lists."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "main", max(self.shares, key=lambda name: self.shares[name]))

    def share_of(self, key: str) -> str:
        """Return the model of the conversation with this key."""
        best, highest = self.main, float("-inf")
        for name, weight in self.shares.items():
            if weight and (score := weight / -log(_draw(self.name, key, name))) > highest:
                best, highest = name, score
        return best

    def order(self, key: str, prefers: str = "") -> list[str]:
        """Return the models for a request, best first: its share's, then the fallbacks. ``prefers``, which
        has answered the conversation before, comes first, unless its share is 0 now. Without a key the
        largest share is meant."""
        first = self.share_of(key) if key else self.main
        before = [prefers] if self.shares.get(prefers) or prefers in self.fallbacks else []
        return list(dict.fromkeys([*before, first, *self.fallbacks]))

    @property
    def targets(self) -> list[str]:
        """The models that may answer."""
        return list(dict.fromkeys([*(n for n, weight in self.shares.items() if weight), *self.fallbacks]))

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {weight:g}" for name, weight in self.shares.items())
        fallbacks = f", else {', '.join(self.fallbacks)}" if self.fallbacks else ""
        shadow = f", {self.shadow_percent:g}% copied to {self.shadow}" if self.shadow else ""
        return f"{self.name}: {shares}{fallbacks}{shadow}"


def _draw(*names: str) -> float:
    """Return a number above 0 and below 1."""
    text = "\0".join(names).encode(errors="surrogatepass")
    return (int.from_bytes(blake2b(text, digest_size=8).digest()) + 0.5) / (DRAWS + 1)
