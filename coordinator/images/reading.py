"""Images as clients send them, decoded: PNG, JPEG, WebP, and the first frame of a GIF."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
BICUBIC = 3
"""Pillow's number of the filter."""
NAMES = "PNG, JPEG, WebP or GIF"
MAX_MEGAPIXELS = 64
"""Looked at before an image is decoded, which takes up to 12 bytes a pixel."""
LARGE_MEGAPIXELS = 4
"""Larger images are decoded and resized one at a time, for their memory."""
_large = Lock()


def decoded(data: str) -> bytes:
    """Return what base64 stands for; line breaks are allowed. Raises ValueError."""
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("its data is no base64") from error


def read_image(data: bytes, size: Callable[[int, int], tuple[int, int]]) -> Picture:
    """Return an image in RGB, turned as its EXIF asks, with white behind what is transparent, and resized to
    ``size(height, width)``.

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

    try:
        picture: Picture = Image.open(BytesIO(data), formats=FORMATS)
        num_pixels = picture.width * picture.height
    except UnidentifiedImageError as error:
        raise ValueError(f"it is no {NAMES}, or its beginning is damaged") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        num_pixels = MAX_MEGAPIXELS * 1_000_000 + 1
    except Exception as error:  # the library raises what its parsers happen upon
        raise ValueError(_damaged(error)) from error
    if num_pixels > MAX_MEGAPIXELS * 1_000_000:
        raise ValueError(f"it has more than {MAX_MEGAPIXELS} megapixels; send it smaller")
    with _large if num_pixels > LARGE_MEGAPIXELS * 1_000_000 else nullcontext():
        try:
            picture = _in_rgb(picture)
        except Exception as error:
            raise ValueError(_damaged(error)) from error
        height, width = size(picture.height, picture.width)
        return picture.resize((width, height), BICUBIC)


def _in_rgb(picture: Picture) -> Picture:
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(picture, in_place=True)
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")


def _damaged(error: Exception) -> str:
    why = str(error)[:100] or type(error).__name__
    return f"it cannot be decoded ({why}); it may be cut short or damaged"
