"""Prompts with images: their pixels go with every attempt, and only to workers that take them."""

from __future__ import annotations

from support.lifecycle_bench import Bench, ends, sent

from splitserve.transport.messages.coordinator import Prefill
from splitserve.transport.messages.images import Image

IMAGE = Image(first=1, num_tokens=4, height=2, width=2, pixels=bytes(12), num_positions=2)
ASKED = {"prompt_token_ids": [5, *range(1 << 30, (1 << 30) + 4), 6], "images": (IMAGE,)}


def bench_with_images() -> Bench:
    bench = Bench()
    for name, role in (("p", "prefill"), ("d", "decode")):
        bench.hello(name, role, incarnation=2, takes_images=True)
    return bench


def test_an_attempt_after_a_death_has_the_images_too() -> None:
    bench = bench_with_images()
    (first,) = sent(bench.submit("r", **ASKED), Prefill)
    (second,) = sent(bench.hello("p", "prefill", incarnation=3, takes_images=True), Prefill)
    assert second.spec.epoch == first.spec.epoch + 1
    for order in (first, second):
        assert order.images == (IMAGE,)
        assert order.spec.rope_shift == -2


def test_workers_that_take_no_images_get_none() -> None:
    bench = bench_with_images()
    bench.hello("old", "decode", incarnation=1)
    (ended,) = ends(bench.submit("r", **ASKED))
    assert ended.error == "unavailable"
    assert "worker old takes no images" in ended.message
    assert sent(bench.submit("s"), Prefill), "without images it is served"


def test_an_attempt_after_an_older_worker_has_joined_is_not_sent_to_it() -> None:
    """It would skip the fields of images that it does not know, and answer wrongly."""
    bench = bench_with_images()
    for i in range(3):
        bench.submit(f"r{i}", **ASKED)
    bench.hello("old", "decode", incarnation=1)
    again = sent(bench.hello("p", "prefill", incarnation=3, takes_images=True), Prefill)
    assert again
    assert {order.decode.worker_id for order in again} == {"d"}
