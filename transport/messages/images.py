"""Images in prompts. The coordinator decodes and resizes them; a prefill worker computes their features.

Each feature stands at a token of its own, whose id is no word's: ``FIRST_IMAGE_ID`` and 30 bits that follow
from the image's content. So all that names, caches, routes and moves blocks by token ids tells images apart.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from .fields import MAX_REQUEST_TOKENS, Message

FIRST_IMAGE_ID = 1 << 30
"""No vocabulary is as large; ids from here on still fit int32."""
MAX_IMAGES = 256
MAX_PIXEL_BYTES = 64 << 20
"""Of a request, in all."""
NAME_BYTES = 16


class Image(Message, frozen=True, kw_only=True):
    """``first``: index of its first token, of ``num_tokens`` in a row; not each must have a feature (a family
    may end rows by a word of its own). ``pixels``: uint8 RGB, [height, width, 3], resized as the model takes
    it."""

    first: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    height: Annotated[int, Meta(ge=1, le=1 << 16)]
    width: Annotated[int, Meta(ge=1, le=1 << 16)]
    pixels: Annotated[bytes, Meta(max_length=MAX_PIXEL_BYTES)]

    def check(self) -> None:
        if len(self.pixels) != 3 * self.height * self.width:
            raise ValueError(f"{len(self.pixels)} bytes are no {self.height} rows of {self.width} pixels")


def image_name(height: int, width: int, pixels: bytes) -> bytes:
    """Return the name of an image by its content, NAME_BYTES long."""
    return hashlib.blake2b(b"%d %d " % (height, width) + pixels, digest_size=NAME_BYTES).digest()


def image_token_ids(name: bytes, count: int) -> NDArray[np.uint32]:
    """Return the ids of the ``count`` tokens at which the features of an image stand."""
    words = np.frombuffer(hashlib.shake_256(name).digest(4 * count), "<u4")
    return words % FIRST_IMAGE_ID + np.uint32(FIRST_IMAGE_ID)
