"""What of a prompt leaves when, and is verified when."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.handoff_pair import BLOCK, DECODE, NUM_LAYERS, Pair, spec, whole

from splitserve.transport.handoff.layer_slicing import LayerSlicing


def test_blocks_leave_while_the_prompt_is_computed() -> None:
    pair = Pair()
    pair.offer(spec())
    pair.deliver()
    pair.sender.blocks_ready((7, 1), [0, 1, 2], 2)
    pair.deliver()
    assert pair.puts == [0, 1]
    assert not pair.joined


def test_layers_leave_while_later_ones_are_computed() -> None:
    pair = Pair(slicing=LayerSlicing(NUM_LAYERS, 64, "layers"))
    pair.offer(spec())
    pair.deliver()
    for layer in range(1, NUM_LAYERS + 1):
        pair.sender.layers_ready((7, 1), [0, 1, 2], 3, layer)
        pair.deliver()
    assert pair.slices == [(0, 3, (layer, layer + 1)) for layer in range(NUM_LAYERS)]
    pair.sender.finish((7, 1), [0, 1, 2], 42, None, pair.now)
    pair.deliver()
    assert len(pair.slices) == NUM_LAYERS
    assert len(pair.joined) == 1


def test_what_is_verified_early_is_not_verified_again() -> None:
    pair = Pair()
    pair.offer(spec())
    pair.deliver()
    pair.sender.blocks_ready((7, 1), [0, 1, 2], 2)
    pair.deliver()
    assert pair.checked == [0, 1]
    pair.sender.finish((7, 1), [0, 1, 2], 42, None, pair.now)
    pair.deliver()
    assert pair.checked == [0, 1, 2]
    assert len(pair.joined) == 1


def test_a_block_found_corrupt_early_is_asked_for_with_the_handoff() -> None:
    pair = Pair()
    pair.corrupt = [{1}]
    pair.offer(spec())
    pair.deliver()
    pair.sender.blocks_ready((7, 1), [0, 1, 2], 2)
    pair.deliver()
    pair.sender.finish((7, 1), [0, 1, 2], 42, None, pair.now)
    pair.deliver()
    assert pair.puts == [0, 1, 2, 1]
    assert len(pair.joined) == 1


@settings(max_examples=200, deadline=None)
@given(
    mode=st.sampled_from(["auto", "layers", "blocks"]),
    rate=st.sampled_from([1e5, 1e6, 1e9]),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    layers=st.lists(st.lists(st.integers(1, NUM_LAYERS), max_size=6), min_size=8, max_size=8),
    lost=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    granted_after=st.integers(0, 20),
    num_cached=st.integers(0, 5),
)
def test_every_layer_of_every_block_leaves_once_in_order_when_it_is_final(
    mode: Any,
    rate: float,
    chunks: list[int],
    layers: list[list[int]],
    lost: list[int],
    granted_after: int,
    num_cached: int,
) -> None:
    """``lost``: the size in tokens of each chunk when it ran out of memory, before it was made again (0: it
    did not)."""
    num_tokens = sum(chunks)
    pair = Pair(slicing=LayerSlicing(NUM_LAYERS, 64, mode), num_blocks=32)
    if num_cached:
        whole(pair, spec(1, num_cached * BLOCK, "earlier"))
        pair.slices.clear()
    pair.room = (0, 0)
    what = spec(2, num_tokens)
    pair.offer(what)
    pair.sender.meetings.note_transfer(DECODE, int(rate), 1.0)
    blocks = list(range(-(-num_tokens // BLOCK)))
    put = dict.fromkeys(blocks, 0)
    computed, moment = 0, 0

    def moved_on(final: int, filling: int, num_layers: int) -> None:
        nonlocal moment
        moment += 1
        if moment == granted_after:
            pair.room = (8, 0)
            pair.receiver.grant_waiting(pair.now)
        pair.deliver()
        for first, count, slice_ in pair.slices:
            start, end = slice_ or (0, NUM_LAYERS)
            for block in range(first, first + count):
                assert put[block] == start
                assert block < final or (block < filling and end <= num_layers)
                put[block] = end
        pair.slices.clear()

    def stop_of(num_computed: int) -> int:
        return len(blocks) if num_computed >= num_tokens else num_computed // BLOCK

    for chunk, seen, num_lost, seen_of_lost in zip(chunks, layers, lost, layers[4:], strict=False):
        lost_stop, lost_layers = stop_of(computed + num_lost), 0
        for lost_layers in sorted(seen_of_lost) if num_lost else ():
            pair.sender.layers_ready((7, 2), blocks, lost_stop, lost_layers)
            moved_on(computed // BLOCK, lost_stop, lost_layers)
        before, computed = computed // BLOCK, computed + chunk
        stop = stop_of(computed)
        assert 0 <= pair.sender.outgoing[7, 2].layer_stride(stop) <= NUM_LAYERS
        for num_layers in sorted(seen):
            pair.sender.layers_ready((7, 2), blocks, stop, num_layers)
            moved_on(
                before, max(stop, lost_stop), max(num_layers, lost_layers)
            )  # what the lost chunk computed may leave late
        if computed < num_tokens:
            pair.sender.blocks_ready((7, 2), blocks, stop)
            moved_on(stop, stop, 0)
    pair.sender.finish((7, 2), blocks, 42, None, pair.now)
    granted_after = moment + 1
    moved_on(len(blocks), len(blocks), 0)
    assert len(pair.joined) == 1 + bool(num_cached)
    already = pair.joined[-1].num_cached_blocks
    assert already == min(num_cached, num_tokens // BLOCK)
    assert [put[block] for block in blocks] == [0] * already + [NUM_LAYERS] * (len(blocks) - already)


def test_a_chunk_that_is_made_again_with_another_size_leaves_each_layer_once() -> None:
    """Its first layers had left when it ran out of memory. A smaller one sent them again, which the receiver
    refuses; a larger one went on with the later layers of blocks that had sent none, and the worker broke on
    their checksums."""
    pair = Pair(slicing=LayerSlicing(NUM_LAYERS, 64, "layers"))
    blocks = [0, 1, 2]
    pair.offer(spec())
    pair.deliver()
    pair.sender.layers_ready((7, 1), blocks, 2, 1)
    pair.sender.blocks_ready((7, 1), blocks, 1)  # smaller
    pair.sender.layers_ready((7, 1), blocks, 3, NUM_LAYERS - 1)  # larger
    pair.sender.finish((7, 1), blocks, 42, None, pair.now)
    pair.deliver()
    rest = (1, NUM_LAYERS)
    assert pair.slices == [(0, 2, (0, 1)), (0, 1, rest), (1, 1, rest), (2, 1, None)]
    assert len(pair.joined) == 1
