"""Cache maps are compared plane by plane; block names of different models, adapters and tenants differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.messages import EXAMPLES, MODEL

from splitserve.transport.errors import BadMessage
from splitserve.transport.messages.blocks import root_hash
from splitserve.transport.messages.cache_map import Plane, map_difference, num_bytes, planes, states
from splitserve.transport.messages.codec import decode, encode
from splitserve.transport.messages.messages import Hello

_MAPS = st.builds(planes, st.integers(1, 5), st.integers(1, 4), st.integers(1, 64)) | st.builds(
    states, st.integers(1, 5), st.integers(1, 64)
)


@given(_MAPS, _MAPS)
def test_the_first_planes_that_differ_are_named(ours: tuple[Plane, ...], theirs: tuple[Plane, ...]) -> None:
    if ours == theirs:
        return
    a, b = map_difference(ours, theirs)
    assert a != b
    assert (b, a) == map_difference(theirs, ours)
    common = [one for one, other in zip(ours, theirs, strict=False) if one == other]
    assert not {a, b} & {str(plane) for plane in common}


@given(_MAPS, st.integers(1, 99))
def test_a_map_with_a_gap_or_an_overlap_is_refused(cache_map: tuple[Plane, ...], shift: int) -> None:
    assert num_bytes(cache_map) == sum(plane.num_bytes for plane in cache_map)
    *before, last = cache_map
    with pytest.raises(ValueError, match="a gap or an overlap at byte"):
        num_bytes((*before, Plane(last.layer, last.kind, 0, 1, last.offset + shift, last.num_bytes)))


def test_a_map_that_is_not_the_blocks_is_refused_where_it_arrives() -> None:
    (hello,) = (example for example in EXAMPLES if isinstance(example, Hello))
    for wrong in (replace(MODEL, block_bytes=MODEL.block_bytes + 1), replace(MODEL, cache_map=())):
        with pytest.raises(BadMessage, match="Hello: the cache map has"):
            decode(encode(replace(hello, model=wrong)), [Hello])


_TEXT = st.text(max_size=6)
_NAMED = st.tuples(_TEXT, st.binary(max_size=6), _TEXT)


@given(_NAMED, _NAMED, st.integers(0, 6))
def test_no_two_of_kv_name_adapter_and_salt_share_a_root(
    one: tuple[str, bytes, str], other: tuple[str, bytes, str], moved: int
) -> None:
    """Also where the end of one field is the beginning of the next."""
    name, salt, adapter = one
    shifted = (name[:moved], salt, name[moved:] + adapter)
    for a, b in ((one, other), (one, shifted), (one, (name, salt[moved:], adapter + salt[:moved].hex()))):
        assert (root_hash(*a) == root_hash(*b)) == (a == b)
