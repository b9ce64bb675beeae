"""The content of a chat's message: text, or parts of text and images."""

from __future__ import annotations

from typing import Any, NamedTuple

from .fields import NULL, invalid, schema

TEXTS = ("text", "refusal")
"""Kinds of parts with text: what an assistant refused earlier in words is text to the template, too."""
DETAILS = (None, "auto", "low", "high", "original")
"""Changes nothing, as in vLLM: the model decides the size of images."""
BASE64 = ";base64,"
MAX_HEAD_CHARS = 256
"""The longest beginning of a data: URL, before its data."""
NO_URL = "must be a data: URL (data:image/png;base64,...) or an http or https address"
MAX_URL_CHARS = 8192
"""The longest address to fetch."""


class ImagePart(NamedTuple):
    """One image of a content."""

    number: int  # of the part
    data: str | bytes  # base64, or the file itself
    url: str = ""  # where the file is still to be fetched


Content = str | tuple[str | ImagePart, ...]
"""Text alone, its parts joined, one a line; with images all parts in their order."""


def content_of(value: Any) -> Content | None:
    """Return a message's content. Raises PydanticCustomError."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of parts")
    parts = [_part(i, part) for i, part in enumerate(value)]
    texts = [part for part in parts if isinstance(part, str)]
    return tuple(parts) if len(texts) < len(parts) else "\n".join(texts)


def _part(index: int, part: Any) -> str | ImagePart:
    if not isinstance(part, dict):
        raise invalid(f'part {index} must be an object such as {{"type": "text", "text": "..."}}')
    if (kind := part.get("type")) == "image_url":
        return _image(index, part.get(kind))
    if kind not in TEXTS:
        raise invalid(f"part {index} has type {kind!r}; this server takes text and image_url")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"part {index} needs a string `{kind}`")
    return text


def _image(index: int, image: Any) -> ImagePart:
    url, detail = (image.get("url"), image.get("detail")) if isinstance(image, dict) else (image, None)
    if not isinstance(url, str):
        raise invalid(f"part {index} needs a string `image_url.url`")
    if detail not in DETAILS:
        raise invalid(f"part {index}: image_url.detail must be {', '.join(filter(None, DETAILS))}")
    if is_data(url):
        return ImagePart(index, url.partition(BASE64)[2])
    if not is_address(url):
        raise invalid(f"part {index}: image_url {NO_URL}")
    return ImagePart(index, "", url)


def is_data(url: str) -> bool:
    """Whether a URL holds base64."""
    return url.startswith("data:") and BASE64 in url[:MAX_HEAD_CHARS]


def is_address(url: str) -> bool:
    """Whether a URL begins as one to fetch."""
    return url[:8].lower().startswith(("http://", "https://")) and len(url) <= MAX_URL_CHARS


_URL: dict[str, Any] = {"type": "string", "pattern": f"^(data:[^,]*{BASE64}|[hH][tT][tT][pP][sS]?://)"}
_DETAIL: dict[str, Any] = {"enum": [*DETAILS]}
_IMAGE_URL: list[dict[str, Any]] = [
    _URL, {"type": "object", "required": ["url"], "properties": {"url": _URL, "detail": _DETAIL}}
]  # fmt: skip
_PARTS: list[dict[str, Any]] = [
    {"type": "object", "required": ["type", kind], "properties": {"type": {"const": kind}, kind: of}}
    for kind, of in [*((kind, {"type": "string"}) for kind in TEXTS), ("image_url", {"anyOf": _IMAGE_URL})]
]
CONTENT = schema({"type": "string"}, {"type": "array", "items": {"anyOf": _PARTS}}, NULL)
