"""Prompts with images: their pixels go with every attempt, and only to workers that take them."""

from __future__ import annotations

from typing import Any

from support.lifecycle_bench import Bench, ends, sent

from splitserve.coordinator.lifecycle.actions import Action
from splitserve.transport.messages.coordinator import Move, Prefill
from splitserve.transport.messages.images import Image
from splitserve.transport.messages.messages import Goodbye

IMAGE = Image(first=1, num_tokens=4, height=2, width=2, pixels=bytes(12), name=bytes(16), num_positions=2)
ASKED = {"prompt_token_ids": [5, *range(1 << 30, (1 << 30) + 4), 6], "images": (IMAGE,)}


class ImageBench(Bench):
    def hello(self, name: str, role: Any, **more: Any) -> list[Action]:
        return super().hello(name, role, **{"takes_images": True, **more})


def test_an_attempt_after_a_death_has_the_images_too() -> None:
    bench = ImageBench()
    (first,) = sent(bench.submit("r", **ASKED), Prefill)
    (second,) = sent(bench.hello("p", "prefill", incarnation=2), Prefill)
    assert second.spec.epoch == first.spec.epoch + 1
    for order in (first, second):
        assert order.images == (IMAGE,)
        assert order.spec.rope_shift == -2


def test_workers_that_take_no_images_get_none() -> None:
    bench = ImageBench()
    bench.hello("old", "decode", takes_images=False)
    (ended,) = ends(bench.submit("r", **ASKED))
    assert ended.error == "unavailable"
    assert "worker old takes no images" in ended.message
    assert sent(bench.submit("s"), Prefill), "without images it is served"


def test_an_attempt_after_an_older_worker_has_joined_is_not_sent_to_it() -> None:
    """It would skip the fields of images that it does not know, and answer wrongly."""
    bench = ImageBench()
    for i in range(3):
        bench.submit(f"r{i}", **ASKED)
    bench.hello("old", "decode", takes_images=False)
    again = sent(bench.hello("p", "prefill", incarnation=2), Prefill)
    assert again
    assert {order.decode.worker_id for order in again} == {"d"}


def test_a_sequence_moves_to_no_worker_that_takes_no_images() -> None:
    bench = ImageBench(dead_after_s=99.0)
    bench.submit("r", **ASKED)
    bench.first(1)
    bench.joined(1)
    bench.step(1, 1, 6)
    bench.hello("old", "decode", takes_images=False)
    assert not sent(bench.load("d", [1], draining=True), Move)
    bench.hello("d2", "decode")
    (move,) = sent(bench.load("d", [1], draining=True), Move)
    assert (move.decode.worker_id, move.spec.rope_shift) == ("d2", -2)


def test_an_attempt_is_not_lent_to_an_older_worker_and_lets_others_pass() -> None:
    bench = ImageBench(dead_after_s=99.0)
    bench.submit("r", **ASKED)
    for role in ("decode", "prefill"):
        more = {"process": "old", "mixed": True, "home": "decode", "takes_images": False}
        bench.hello(f"old:{role}", role, **more)
    actions = [*bench.send("p", Goodbye(worker_id="p", incarnation=1))]
    actions += bench.send("d", Goodbye(worker_id="d", incarnation=1))
    assert not sent(actions, Prefill)
    (plain,) = sent(bench.submit("s"), Prefill)
    assert plain.decode.worker_id == "old:decode", "without images it is lent, past the one that waits"
