"""A Prefill with many pixels travels in frames that nothing waits for, to workers that join them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.channels import HELLO, WELCOME, dealer, raw_socket, router, until
from support.messages import EXAMPLES, SPEC

from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.errors import BadMessage
from splitserve.transport.messages import pixel_frames
from splitserve.transport.messages.codec import decode
from splitserve.transport.messages.images import MAX_IMAGES, MAX_PIXEL_BYTES, Image
from splitserve.transport.messages.messages import FROM_COORDINATOR, Hello, Message, Peer, Prefill, u32
from splitserve.transport.messages.pixel_frames import MAX_FRAMES, PIECE_BYTES, TAG, joined, split

WORKER = b"p0\0a1"
PEER = Peer(worker_id="d0", incarnation=4, address="tcp://127.0.0.1:1")


def prefill(*sizes: tuple[int, int]) -> Prefill:
    """Return one with images of these heights and widths."""
    images = [
        Image(first=i, num_tokens=1, height=height, width=width, pixels=bytes([i]) * 3 * height * width,
              name=bytes(16))
        for i, (height, width) in enumerate(sizes)
    ]  # fmt: skip
    count = len(sizes) + 1
    spec = replace(SPEC, token_ids=u32(range(count)), num_prompt_tokens=count)
    return Prefill(spec=spec, decode=PEER, images=tuple(images))


SMALL, LARGE = prefill((2, 3)), prefill((300, 500), (1, 1), (512, 512), (64, 64))


def introduced(server: RouterChannel, peer: Any, *, joins: bool) -> None:
    """Have the peer send its Hello."""
    (hello,) = [one for one in EXAMPLES if isinstance(one, Hello)]
    peer.send(replace(hello, joins_frames=joins))
    until(lambda: server.receive(10))


@pytest.mark.parametrize("joins", [True, False])
def test_all_arrives_whole_and_in_order(stack: ExitStack, joins: bool) -> None:
    server = router(stack)
    worker = dealer(stack, server.address)
    introduced(server, worker, joins=joins)
    many = prefill(*[(20, 20)] * MAX_IMAGES)
    sent = [WELCOME, LARGE, SMALL, WELCOME, LARGE, many]
    assert server.send(WORKER, *sent)
    assert server.send(WORKER, WELCOME)
    found: list[Message] = []
    until(lambda: found.extend(worker.receive(10)) or len(found) == len(sent) + 1)
    assert found == [*sent, WELCOME]
    assert (server.counters.sent, worker.counters.received) == (7, 7)
    assert worker.counters.bad == 0


@pytest.mark.parametrize("joins", [True, False])
def test_frames_that_are_sent(stack: ExitStack, joins: bool) -> None:
    """An older worker gets what it always got."""
    server, counts = router(stack, None), list[int]()
    peer = raw_socket(stack, server.address, None)
    (hello,) = [one for one in EXAMPLES if isinstance(one, Hello)]
    peer.send(pixel_frames.encode(replace(hello, joins_frames=joins)))
    ((identity, _),) = until(lambda: server.receive(10))
    server.send(identity, SMALL, LARGE, SMALL)
    while len(counts) < (3 if joins else 1):
        frames = peer.recv_multipart()
        assert all(len(frame) <= PIECE_BYTES for frame in frames) or not joins
        counts.append(len(frames))
    # of 450,000 bytes, 3, 786,432 and 12,288
    assert counts == ([1, 1 + 2 + 1 + 3 + 1, 1] if joins else [3])


def test_pixels_are_not_copied_before_they_are_sent() -> None:
    for piece in split(LARGE)[1:]:
        assert isinstance(piece, memoryview)
        assert any(piece.obj is image.pixels for image in LARGE.images)


def test_a_prefill_that_is_too_large_is_not_sent(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    server = router(stack)
    worker = dealer(stack, server.address)
    introduced(server, worker, joins=True)
    monkeypatch.setattr(pixel_frames, "MAX_PIXEL_BYTES", 1_000_000)
    assert not server.send(WORKER, WELCOME, LARGE, WELCOME)
    found: list[Message] = []
    until(lambda: found.extend(worker.receive(10)) or len(found) == 2)
    assert found == [WELCOME, WELCOME]
    assert server.counters.dropped_too_large == 1


def test_no_prefill_has_more_frames_than_a_worker_takes() -> None:
    """The worst are as many images as there may be, each a little larger than whole pieces."""
    most = MAX_PIXEL_BYTES // PIECE_BYTES
    assert max(images + most for images in range(MAX_IMAGES + 1)) + 1 <= MAX_FRAMES


FRAMES = [bytes(frame) for frame in split(LARGE)]


@pytest.mark.parametrize(
    "frames",
    [
        FRAMES[:-1],
        FRAMES[:1],
        [*FRAMES, b"a"],
        [*FRAMES[:-1], FRAMES[-1] + b"a"],
        [FRAMES[0], FRAMES[2], FRAMES[3], FRAMES[1], *FRAMES[4:]],
        [TAG, *FRAMES[1:]],
        [TAG + b"\xc1", *FRAMES[1:]],
    ],
)  # fmt: skip
def test_frames_that_do_not_fit(stack: ExitStack, frames: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        joined(frames, FROM_COORDINATOR)
    context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
    server = stack.enter_context(context.socket(zmq.ROUTER))
    worker = dealer(stack, f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}", None)
    worker.send(HELLO)
    identity = server.recv_multipart()[0]
    server.send_multipart([identity, *frames])
    server.send_multipart([identity, *FRAMES])
    assert until(lambda: worker.receive(10)) == [LARGE]
    assert worker.counters.bad == 1


def test_more_pixels_than_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_frames, "MAX_PIXEL_BYTES", 1_000_000)
    with pytest.raises(BadMessage, match="more than 1000000 bytes of pixels"):
        joined(FRAMES, FROM_COORDINATOR)


SIDE = st.integers(1, 40)


@given(sizes=st.lists(st.tuples(SIDE, SIDE), max_size=8), piece=st.integers(1, 500))
def test_every_prefill_is_joined_as_it_was(sizes: list[tuple[int, int]], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixel_frames, "PIECE_BYTES", piece)
        frames = split(prefill(*sizes))
        assert joined([bytes(frame) for frame in frames], FROM_COORDINATOR) == prefill(*sizes)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_any_frames_are_a_message_or_a_bad_one(frames: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        joined([TAG + frames[0], *frames[1:]], FROM_COORDINATOR)
    with pytest.raises(BadMessage):
        decode(TAG + frames[0], FROM_COORDINATOR)
