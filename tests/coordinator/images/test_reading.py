"""Files of images as anyone may send them: decoded as transformers decodes them, or refused by a sentence."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from support.image_models import encoded, picture

from splitserve.coordinator.images.reading import decoded, num_scans, opened, prepared

PLAIN = picture(9, 14)
FILES = {
    "PNG": encoded(picture(9, 14, "RGBA")),
    "JPEG": encoded(PLAIN, "JPEG"),
    "WEBP": encoded(PLAIN, "WEBP", lossless=True),
    "GIF": encoded(PLAIN.quantize(16), "GIF"),
}


def read(file: bytes, size: Callable[[int, int], tuple[int, int]]) -> Image.Image:
    def fit(image: Image.Image) -> Image.Image:
        height, width = size(image.height, image.width)
        return image.resize((width, height))

    return prepared(opened(file), fit)


def as_is(height: int, width: int) -> tuple[int, int]:
    return height, width


@pytest.mark.parametrize("format", FILES)
def test_formats(format: str) -> None:
    theirs = Image.open(io.BytesIO(FILES[format]))
    white = Image.new("RGBA", theirs.size, "white")
    expected = Image.alpha_composite(white, theirs.convert("RGBA")).convert("RGB")
    assert np.array_equal(np.asarray(read(FILES[format], as_is)), np.asarray(expected))


def test_the_first_frame_of_several() -> None:
    frames = [picture(9, 14, seed=seed).quantize(16) for seed in range(3)]
    file = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(np.asarray(read(file, as_is)), np.asarray(frames[0].convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_asks(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encoded(PLAIN, exif=exif)
    with_exif = Image.open(io.BytesIO(file))
    expected = np.asarray(ImageOps.exif_transpose(with_exif).convert("RGB"))
    found = read(file, as_is)
    assert np.array_equal(np.asarray(found), expected)
    assert found.height == (14 if orientation > 4 else 9)


def test_what_is_transparent_by_a_colour_is_white() -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([9, 9, 9, 200, 0, 0])
    image.putpixel((1, 0), 1)
    found = read(encoded(image, transparency=0), as_is)
    assert np.asarray(found).tolist() == [[[255, 255, 255], [200, 0, 0]]]


def test_a_grey_image_of_16_bits_keeps_its_levels() -> None:
    levels = np.array([[0, 255, 256, 0x8000, 0xFFFF]], np.uint16)
    found = read(encoded(Image.fromarray(levels)), as_is)
    assert np.asarray(found)[0].tolist() == [[level] * 3 for level in (0, 0, 1, 128, 255)]
    found = read(encoded(Image.fromarray(levels), transparency=256), as_is)
    assert np.asarray(found)[0, 2].tolist() == [255] * 3


def test_odd_fields_of_exif_spoil_no_image() -> None:
    """The library reads this field, and cannot write it."""
    exif = Image.Exif()
    exif[0x0112], exif[0x011A] = 6, 72.0
    file = encoded(PLAIN, "JPEG", exif=exif)
    field = file.index(bytes.fromhex("011a0005"))
    file = file[: field + 2] + b"\0\2" + file[field + 4 :]  # text in place of a ratio
    assert read(file, as_is).size == (9, 14)


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    """A second of work for each 10 scans."""
    file = encoded(Image.new("L", (8000, 8000), 128), "JPEG", progressive=True)
    scan = file[file.rindex(b"\xff\xda") : -2]
    assert num_scans(file) == 6
    many = file[:-2] + scan * 15 + file[-2:]
    assert len(many) < len(file) + 2000
    opened(file)
    with pytest.raises(ValueError, match="too many scans"):
        opened(many)


def test_scans_of_previews_and_of_what_follows_do_not_count() -> None:
    preview = encoded(PLAIN, "JPEG", exif=b"Exif\0\0" + FILES["JPEG"])
    assert num_scans(preview + FILES["JPEG"]) == 1
    large = encoded(picture(200, 200), "JPEG", quality=98)  # whose data has the byte 255
    assert num_scans(large) == 1
    assert num_scans(large[:-2]) == num_scans(large[:9000]) == 1


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (b"", "is no PNG, JPEG, WebP or GIF"),
        (b"%PDF-1.7", "is no PNG, JPEG, WebP or GIF"),
        (encoded(PLAIN, "BMP"), "is no PNG, JPEG, WebP or GIF"),
        (encoded(PLAIN, "TIFF"), "is no PNG, JPEG, WebP or GIF"),
        (FILES["PNG"][:-60], "cut short or damaged"),
        (FILES["JPEG"][:-60], "cut short or damaged"),
        (FILES["WEBP"][:-60], "it"),
        (png(8001, 8000), "more than 64 megapixels"),
        (png(12_000, 8000), "more than 64 megapixels"),  # for which the library warns
        (png(65_536, 1), "one of its sides has more than 65,535 pixels"),  # resizing takes memory by side
        (png(1 << 30, 1 << 30), "more than 64 megapixels"),
        (png(100, 100, b"\0" * 50), "cut short or damaged"),
        (png(0, 5), "it"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else "",
)
def test_a_bad_file_is_refused_before_it_costs_anything(file: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(file, as_is)


def test_base64() -> None:
    assert decoded("aGVs\nbG8=\r\n") == b"hello"
    for bad in ("aGVsbG8", "a*==", "aGVs-G8=", "é"):
        with pytest.raises(ValueError, match="no base64"):
            decoded(bad)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_damage_ends_otherwise_than_in_an_image_or_a_sentence(data: Any) -> None:
    file = bytearray(FILES[data.draw(st.sampled_from(sorted(FILES)))])
    for at in data.draw(st.lists(st.integers(0, len(file) - 1), max_size=8)):
        file[at] = data.draw(st.integers(0, 255))
    file = file[: data.draw(st.integers(0, len(file)))] if data.draw(st.booleans()) else file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's, of odd files that it reads all the same
        try:
            found: object = read(bytes(file), lambda height, width: (2, 3)).size
        except ValueError as error:
            found = type(error), str(error)[:3]
    assert found in ((3, 2), (ValueError, "it "))
