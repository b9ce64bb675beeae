"""The cache map: which plane of the KV cache lies where in a block of a worker's pool. Pure.

Two workers exchange blocks if their maps are equal, plane by plane: layers of unlike kinds need no other
comparison. Within a plane each head is one run of bytes, token after token.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

_Number: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 32)]
Kind: TypeAlias = Literal["key", "value", "latent", "state"]


class Plane(Struct, frozen=True, array_like=True):
    """A part of one layer. ``latent`` and ``state`` have no heads: they count as one."""

    layer: _Number
    kind: Kind
    first_head: _Number
    num_heads: _Number
    offset: _Number  # in bytes, from the block's first
    num_bytes: _Number

    def __str__(self) -> str:
        heads = f"heads {self.first_head} to {self.first_head + self.num_heads - 1}"
        return f"{self.kind} of layer {self.layer}, {heads}, {self.num_bytes} bytes at {self.offset}"


CacheMap: TypeAlias = Annotated[tuple[Plane, ...], Meta(max_length=1000)]
"""In the order of their offsets, without gaps."""


def planes(
    num_layers: int, num_heads: int, plane_bytes: int, kinds: tuple[Kind, ...] = ("key", "value")
) -> tuple[Plane, ...]:
    """Return the map of a block in which each layer has these planes, one after another."""
    order = enumerate((layer, kind) for layer in range(num_layers) for kind in kinds)
    return tuple(
        Plane(layer, kind, 0, num_heads, number * plane_bytes, plane_bytes) for number, (layer, kind) in order
    )


def states(num_layers: int, layer_bytes: int) -> tuple[Plane, ...]:
    """Return the map of a block whose layers have no heads."""
    return planes(num_layers, 1, layer_bytes, ("state",))


def num_bytes(cache_map: tuple[Plane, ...]) -> int:
    """Return the size of a block. Raises ValueError if its planes do not fill it one after another."""
    end = 0
    for plane in cache_map:
        if plane.offset != end:
            raise ValueError(f"the cache map has a gap or an overlap at byte {end}: {plane}")
        end += plane.num_bytes
    return end


def map_difference(ours: tuple[Plane, ...], theirs: tuple[Plane, ...]) -> tuple[str, str]:
    """Return the first planes that differ, in words. The maps are not equal."""
    shared = zip(ours, theirs, strict=False)
    number = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(ours), len(theirs)))
    a, b = (str(planes[number]) if number < len(planes) else "nothing more" for planes in (ours, theirs))
    return a, b
