"""How finely blocks are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.transport.handoff.layer_slicing import PUT_S, LayerSlicing, seen

MIB = 1 << 20


def exposed(slicing: LayerSlicing, num_blocks: int, rate: float, layers: int) -> float:
    """The formula of the module, for this many layers a put."""
    slices = slicing.num_layers / layers
    return num_blocks * slicing.block_bytes / (slices * rate) + slices * PUT_S


def test_a_short_prompt_leaves_whole() -> None:
    assert LayerSlicing(32, MIB).layers_per_put(1, rate=10e9) == 32


def test_a_long_chunk_over_a_slow_mover_leaves_layer_by_layer() -> None:
    assert LayerSlicing(32, MIB).layers_per_put(512, rate=1e9) == 1


def test_the_mode_decides_where_it_is_not_auto() -> None:
    assert LayerSlicing(32, MIB, "blocks").layers_per_put(512, rate=1e9) == 32
    assert LayerSlicing(32, MIB, "layers").layers_per_put(1, rate=10e9) == 1


@given(num_layers=st.integers(1, 80), num_blocks=st.integers(1, 2000), rate=st.floats(1e6, 1e12))
def test_the_choice_is_near_the_best_of_all(num_layers: int, num_blocks: int, rate: float) -> None:
    slicing = LayerSlicing(num_layers, MIB)
    chosen = slicing.layers_per_put(num_blocks, rate)
    assert 1 <= chosen <= num_layers
    best = min(exposed(slicing, num_blocks, rate, layers) for layers in range(1, num_layers + 1))
    assert exposed(slicing, num_blocks, rate, chosen) <= 2 * best


def test_the_rate_follows_what_is_seen() -> None:
    rate = seen(None, 100 * MIB, 0.1)
    assert rate == 1000 * MIB
    for _ in range(40):
        rate = seen(rate, 100 * MIB, 1.0)
    assert abs(rate - 100 * MIB) < MIB
