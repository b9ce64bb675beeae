"""Images in prompts. The coordinator decodes and resizes them; a prefill worker computes their features.

Each feature stands at a token of its own, whose id is no word's: ``FIRST_IMAGE_ID`` and 30 bits that follow
from the image's content. So whatever names, caches, routes or moves blocks by token ids does it for images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from .fields import MAX_REQUEST_TOKENS, Message

FIRST_IMAGE_ID = 1 << 30
"""No vocabulary is as large; ids from here on still fit int32."""
MAX_IMAGES = 256
MAX_PIXEL_BYTES = 64 << 20  # of all images of a request
NAME_BYTES = 16


class Image(Message, frozen=True, kw_only=True, weakref=True):
    """``first``: index of its first token, of ``num_tokens`` in a row; not each must have a feature (a family
    may end rows by a word of its own). ``pixels``: uint8 RGB, [height, width, 3], resized as the model takes
    it. ``num_positions``: rope positions that it takes where each token has that of its row and that of its
    column: the larger of both numbers; 0: its tokens have positions as words have."""

    first: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    height: Annotated[int, Meta(ge=1, le=1 << 16)]
    width: Annotated[int, Meta(ge=1, le=1 << 16)]
    pixels: Annotated[bytes, Meta(max_length=MAX_PIXEL_BYTES)]
    name: Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]  # see ``image_name``
    num_positions: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)] = 0

    def check(self) -> None:
        if len(self.pixels) != 3 * self.height * self.width:
            raise ValueError(f"{len(self.pixels)} bytes are no {self.height} rows of {self.width} pixels")
        if (most := self.num_positions) and not self.num_tokens <= most * most <= self.num_tokens * most:
            raise ValueError(f"{self.num_tokens} tokens are no rows and columns of at most {most}")

    @property
    def end(self) -> int:
        """Index of the token behind it."""
        return self.first + self.num_tokens


def image_name(height: int, width: int, pixels: bytes) -> bytes:
    """Return the name of an image by its content, NAME_BYTES long."""
    return hashlib.blake2b(b"%d %d " % (height, width) + pixels, digest_size=NAME_BYTES).digest()


def image_token_ids(name: bytes, count: int) -> NDArray[np.uint32]:
    """Return the ids of the ``count`` tokens at which the features of an image stand."""
    words = np.frombuffer(hashlib.shake_256(name).digest(4 * count), "<u4")
    return words % FIRST_IMAGE_ID + np.uint32(FIRST_IMAGE_ID)


def rope_shift(images: Sequence[Image]) -> int:
    """Return the rope position of a token behind these images less its index."""
    return sum(image.num_positions - image.num_tokens for image in images if image.num_positions)


def rope_positions(images: Sequence[Image], num_tokens: int) -> NDArray[np.int32] | None:
    """Return the positions of a text with images: int32 [3, num_tokens], in time, by rows and by columns,
    which differ within images alone (Wang et al., Qwen2-VL, 2024, section 2.1). None: they are 0, 1, 2,
    ..."""
    if not any(image.num_positions for image in images):
        return None
    positions = np.arange(num_tokens, dtype=np.int32)[None].repeat(3, 0)
    for image in images:
        if not image.num_positions:
            continue
        first, end, others = image.first, image.end, image.num_tokens // image.num_positions
        num_columns = others if image.height >= image.width else image.num_positions
        rows, columns = np.divmod(np.arange(image.num_tokens, dtype=np.int32), num_columns)
        start = positions[0, first]
        positions[:, first:end] = start + np.stack((np.zeros_like(rows), rows, columns))
        positions[:, end:] -= image.num_tokens - image.num_positions
    return positions
