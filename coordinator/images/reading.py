"""Images as clients send them, decoded: PNG, JPEG, WebP, and the first frame of a GIF."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
BICUBIC = 3
"""Pillow's number of the filter."""
NAMES = "PNG, JPEG, WebP or GIF"
MAX_PIXELS = 64_000_000
"""Looked at before an image is decoded, which takes up to 12 bytes a pixel."""
MAX_SIDE = 65_535
"""Of JPEG and GIF. To resize takes 32 bytes for each pixel of a side, whatever the other side is."""
MAX_PIXELS_IN_ALL = 4 * MAX_PIXELS
"""For one request: to decode as many takes seconds."""
MAX_SCANNED = 20 * MAX_PIXELS
"""Pixels times scans of a JPEG: a scan of 100 bytes goes over all pixels again. Usual are 1 to 15 scans."""
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""Of JPEG; not those inside a scan's data."""
SCAN, END = 0xDA, 0xD9
ORIENTATION = 0x0112  # of EXIF
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's number of the turn, by orientation; of others none."""
LARGE_PIXELS = 4_000_000
"""Images of more are decoded and resized one at a time, for their memory."""
_large = Lock()


def decoded(data: str) -> bytes:
    """Return what base64 stands for; line breaks are allowed. Raises ValueError."""
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("its data is no base64") from error


def opened(data: bytes) -> Picture:
    """Return an image whose size is known; its pixels are still to be decoded.

    Raises ValueError with what is wrong, as the end of a sentence about the image.
    """
    # slow to import, and most servers never see an image; the plugins are those of FORMATS
    from PIL import (  # noqa: F401
        GifImagePlugin,
        Image,
        JpegImagePlugin,
        PngImagePlugin,
        UnidentifiedImageError,
        WebPImagePlugin,
    )

    too_large = f"it has more than {MAX_PIXELS // 1_000_000} megapixels; send it smaller"
    try:
        picture: Picture = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is no {NAMES}, or its beginning is damaged") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(too_large) from error
    except Exception as error:  # the library raises what its parsers happen upon
        raise ValueError(_damaged(error)) from error
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(too_large)
    if max(picture.size) > MAX_SIDE:
        raise ValueError(f"one of its sides has more than {MAX_SIDE:,} pixels; send it smaller")
    if picture.format in ("JPEG", "MPO") and num_scans(data) * picture.width * picture.height > MAX_SCANNED:
        raise ValueError("it is compressed in too many scans; save it without progressive compression")
    return picture


def num_scans(data: bytes) -> int:
    """Return the number of a JPEG's scans, without those of previews in its metadata."""
    count, at = 0, 2
    while (marker := MARKER.search(data, at)) is not None and data[marker.start() + 1] != END:
        count += data[marker.start() + 1] == SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return count


def prepared(picture: Picture, fit: Callable[[Picture], Picture]) -> Picture:
    """Return ``fit`` of an opened image in RGB, turned as its EXIF asks, with white behind what is
    transparent. Raises ValueError like ``opened``, or as ``fit`` does."""
    with _large if picture.width * picture.height > LARGE_PIXELS else nullcontext():
        try:
            picture = _in_rgb(picture)
        except Exception as error:
            raise ValueError(_damaged(error)) from error
        return fit(picture)


def _in_rgb(picture: Picture) -> Picture:
    from PIL import Image

    picture.load()
    if (turn := TURNS.get(_orientation(picture))) is not None:
        picture = picture.transpose(Image.Transpose(turn))
    if picture.mode.startswith("I"):
        return _in_8_bits(picture).convert("RGB")
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    if picture.mode != "RGBA":
        picture = picture.convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    return picture.convert("RGB")


def _orientation(picture: Picture) -> int:
    """0: none is known."""
    try:
        found = picture.getexif().get(ORIENTATION)
        return found if isinstance(found, int) else 0
    except Exception:  # the library's parser met damage; the picture itself is whole
        return 0


def _in_8_bits(picture: Picture) -> Picture:
    """Return a grey image of 16 bits as one of 8; the library would cut off what is above 255."""
    from PIL import Image

    levels = np.asarray(picture)
    high = (levels >> 8).astype(np.uint8)
    if (transparent := picture.info.get("transparency")) is not None:
        high[levels == transparent] = 255
    return Image.fromarray(high)


def _damaged(error: Exception) -> str:
    why = str(error)[:100] or type(error).__name__
    return f"it cannot be decoded ({why}); it may be cut short or damaged"
