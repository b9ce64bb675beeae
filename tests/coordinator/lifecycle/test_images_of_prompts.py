"""The pixels of a prompt's images go to the prefill worker of each attempt."""

from __future__ import annotations

from support.lifecycle_bench import Bench, sent

from splitserve.transport.messages.images import Image
from splitserve.transport.messages.messages import Prefill, RequestFailed

IMAGES = (Image(first=1, num_tokens=3, height=1, width=2, pixels=bytes(6)),)


def test_each_attempt_has_the_images() -> None:
    bench = Bench()
    (first,) = sent(bench.submit(images=IMAGES, rope_shift=-2), Prefill)
    lost = RequestFailed(coordinator=7, dispatch=first.spec.dispatch, kind="internal", message="it raised")
    (second,) = sent(bench.send("p", lost), Prefill)
    for order in (first, second):
        assert (order.images, order.spec.rope_shift) == (IMAGES, -2)
