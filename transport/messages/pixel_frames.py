"""A Prefill with many pixels as several frames of one ZeroMQ message: the message without them, then the
pixels of each image in pieces.

A frame is encrypted and decrypted in one go, and what else the same thread carries waits for it: a worker's
tokens for the pixels of another one. ZeroMQ delivers all frames of a message or none. Only workers that join
them are sent such messages: see ``Hello``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from ..errors import BadMessage
from .codec import WIRE, decode, encode
from .images import MAX_IMAGES, MAX_PIXEL_BYTES, Image
from .messages import Message, Prefill

TAG = b"\x1b"
"""Begins the first frame, in place of Prefill's tag."""
PIECE_BYTES = 1 << 18
"""The length of all of an image's pieces but the last. Pixels of more, all images together, are split."""
MAX_FRAMES = 1 + MAX_IMAGES + MAX_PIXEL_BYTES // PIECE_BYTES
Frame = bytes | memoryview
_PREFILL = bytes([next(tag for tag, (kind, _) in WIRE.items() if kind is Prefill)])


def has_large_pixels(message: Message) -> bool:
    return isinstance(message, Prefill) and _num_bytes(message.images) > PIECE_BYTES


def split(message: Message) -> list[Frame]:
    """Return the frames of a Prefill, without a copy of its pixels. Raises BadMessage if it is too large."""
    assert isinstance(message, Prefill)
    if (count := _num_bytes(message.images)) > MAX_PIXEL_BYTES:
        raise BadMessage(f"Prefill with {count} bytes of pixels; at most {MAX_PIXEL_BYTES} are allowed")
    bare = replace(message, images=tuple(replace(image, pixels=b"") for image in message.images))
    pieces = [
        memoryview(image.pixels)[at : at + PIECE_BYTES]
        for image in message.images
        for at in range(0, len(image.pixels), PIECE_BYTES)
    ]
    return [TAG + encode(bare)[1:], *pieces]


def joined(frames: Sequence[bytes], allowed: Collection[type[Message]]) -> Message:
    """Return the Prefill of such frames. Raises BadMessage."""

    def fill(message: Message) -> Message:
        assert isinstance(message, Prefill)
        if sum(map(len, frames[1:])) > MAX_PIXEL_BYTES:
            raise ValueError(f"more than {MAX_PIXEL_BYTES} bytes of pixels")
        images, at = list[Image](), 1
        for image in message.images:
            end = at - (-3 * image.height * image.width // PIECE_BYTES)
            images.append(replace(image, pixels=b"".join(frames[at:end])))
            at = end
        if at != len(frames):
            raise ValueError(f"{len(frames) - 1} pieces of pixels where there should be {at - 1}")
        return replace(message, images=tuple(images))

    return decode(_PREFILL + frames[0][1:], allowed, fill)


def _num_bytes(images: Sequence[Image]) -> int:
    return sum([len(image.pixels) for image in images])
