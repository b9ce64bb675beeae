"""The KV handoff, both ends joined by a test."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from msgspec.structs import replace
from support.handoff_pair import DECODE, MODEL, Pair, spec, whole

from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.blocks import NO_BLOCK
from splitserve.transport.messages.cache_map import planes
from splitserve.transport.messages.messages import Grant, u32


def test_a_handoff() -> None:
    pair = Pair()
    whole(pair, spec())
    (join,) = pair.joined
    assert (join.handoff.token, len(join.blocks), join.num_cached_blocks) == (42, 3, 0)
    assert pair.ended == [act.Delivered((7, 1))]
    assert pair.puts == [0, 1, 2]
    assert pair.receiver.leases.num_blocks == 0


def test_what_the_receiver_has_is_not_sent() -> None:
    pair = Pair()
    whole(pair, spec(1, 12))
    pair.pool.release(pair.joined[0].blocks)
    pair.puts.clear()
    whole(pair, spec(2, 14, "other"))
    assert pair.joined[1].num_cached_blocks == 3
    assert pair.puts == [3]


def test_what_the_prefill_worker_had_cached_travels_with_the_handoff() -> None:
    pair = Pair()
    whole(pair, spec(), num_cached_tokens=8)
    assert pair.joined[0].handoff.num_cached_tokens == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_name", "x"),
        ("dtype", "bfloat16"),
        ("block_size", 8),
        ("block_bytes", 9),
        ("window", 8),
        ("numerics", "exact, C++ avx2"),
    ],
)
def test_a_different_model_is_refused_in_a_sentence_that_names_the_field(field: str, value: Any) -> None:
    pair = Pair(model=replace(MODEL, **{field: value}))
    whole(pair, spec())
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert f"{field.replace('_', ' ').replace('kv', 'KV')} differs" in ended.message
    assert repr(value) in ended.message


def test_cache_maps_that_differ_are_refused_by_the_first_plane_that_does() -> None:
    """Here: a worker that holds two of four heads of each layer."""
    ours = replace(MODEL, cache_map=planes(2, 4, 16))
    pair = Pair(own=ours, model=replace(ours, cache_map=planes(4, 2, 8)))
    whole(pair, spec())
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert "cache map differs: decode has key of layer 0, heads 0 to 3, 16 bytes at 0" in ended.message
    assert "prefill has key of layer 0, heads 0 to 1, 8 bytes at 0" in ended.message


def test_another_revision_of_the_same_weights_is_taken() -> None:
    pair = Pair(model=replace(MODEL, revision="with another template"))
    whole(pair, spec())
    assert len(pair.joined) == 1


def test_no_mover_in_common() -> None:
    pair = Pair(movers=("pigeon",))
    whole(pair, spec())
    assert isinstance(pair.ended[0], act.Undelivered)
    assert "no mover in common" in pair.ended[0].message


def test_without_room_the_grant_comes_later() -> None:
    pair = Pair()
    pair.room = (0, 0)
    whole(pair, spec())
    assert not pair.joined
    pair.room = (1, 0)
    pair.tick(0.1)
    pair.deliver()
    assert len(pair.joined) == 1


def test_an_offer_that_waits_for_a_row_costs_no_look_at_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 8,192 tokens has hundreds of hashes, and every sequence that ends asks again."""
    pair, looks = Pair(), []
    match_prefix = pair.pool.match_prefix
    monkeypatch.setattr(
        pair.pool, "match_prefix", lambda hashes: looks.append(hashes) or match_prefix(hashes)
    )
    pair.room = (0, 0)
    whole(pair, spec())
    pair.tick(0.1)
    assert len(pair.receiver.granting.waiting) == 1
    assert not looks
    pair.room = (1, 0)
    pair.tick(0.1)
    assert len(looks) == 2  # room was found, and then taken


def test_a_prompt_may_take_every_block() -> None:
    """No sequence is longer than the cache: what has come to its last block may have to go on elsewhere."""
    pair = Pair(num_blocks=3)
    whole(pair, spec())
    (join,) = pair.joined
    assert len(join.blocks) == pair.pool.num_blocks


def test_what_can_never_fit_is_refused_for_good() -> None:
    pair = Pair(num_blocks=2)
    whole(pair, spec(num_tokens=40))
    assert isinstance(pair.ended[0], act.Undelivered)
    assert pair.ended[0].kind == "refused"
    assert "10 KV blocks" in pair.ended[0].message


def test_a_corrupt_block_is_asked_for_once_more() -> None:
    pair = Pair()
    pair.corrupt = [{1}]
    whole(pair, spec())
    assert pair.puts == [0, 1, 2, 1]
    assert len(pair.joined) == 1
    assert pair.receiver.num_corrupt_blocks == 1


def test_corrupt_twice_is_a_failure_that_frees_everything() -> None:
    pair = Pair()
    pair.corrupt = [{1}, {1}]
    whole(pair, spec())
    assert not pair.joined
    assert isinstance(pair.ended[0], act.Undelivered)
    assert pair.pool.num_used == 0


def test_an_older_epoch_is_refused_and_a_newer_one_replaces() -> None:
    pair = Pair()
    pair.offer(spec(1, epoch=1))
    pair.deliver()
    pair.offer(spec(2, epoch=2))
    pair.deliver()
    assert isinstance(pair.ended[0], act.Undelivered)
    assert pair.ended[0].key == (7, 1)
    pair.offer(spec(3, epoch=1))
    pair.deliver()
    assert pair.ended[1].key == (7, 3)
    pair.compute(spec(2, epoch=2))
    pair.deliver()
    assert [join.key for join in pair.joined] == [(7, 2)]


def test_blocks_behind_a_sliding_window_take_no_room_and_do_not_travel() -> None:
    model = replace(MODEL, window=6)
    pair = Pair(num_blocks=5, model=model, own=model)
    whole(pair, spec(1, 30))
    assert pair.puts == [6, 7]
    assert pair.joined[0].blocks[:6] == [NO_BLOCK] * 6
    assert (pair.pool.num_used, pair.joined[0].num_cached_blocks) == (2, 0)
    pair.pool.release(pair.joined[0].blocks)
    whole(pair, spec(2, 30, "other"))
    assert pair.puts == [6, 7, 7]  # all but the partial one is here
    assert pair.joined[1].num_cached_blocks == 1


def test_a_grant_that_wants_blocks_behind_the_window_is_refused() -> None:
    model = replace(MODEL, window=6)
    pair = Pair(model=model, own=model)
    pair.offer(spec(1, 30))
    pair.collect()
    pair.deliver(lambda message: isinstance(message, Grant))
    grant = Grant(
        coordinator=7,
        dispatch=1,
        lease=1,
        secret=b"s" * 16,
        blocks=u32([0] * 8),
        num_cached_blocks=5,
        lease_s=3,
    )
    pair.sender.receive(DECODE, grant, 0.0)
    pair.collect()
    assert [type(ended) for ended in pair.ended] == [act.Undelivered]


def test_what_is_remembered_of_the_past_is_bounded_and_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(act, "MEMORY_OF_PAST", 2)
    past = OrderedDict[str, int]()
    for number, key in enumerate("abac"):
        act.remember(past, key, number)
    assert past == {"a": 2, "c": 3}


def test_shutting_a_writer_out_ends_no_others_lease() -> None:
    pair = Pair(movers=("nixl",))
    pair.offer(spec())
    pair.deliver()
    pair.receiver.writer_shut_out(("another", 1))
    pair.compute(spec())
    pair.deliver()
    assert len(pair.joined) == 1
