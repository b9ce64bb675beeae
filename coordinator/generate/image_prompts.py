"""Puts the images of a chat into its prompt: their tokens, and their pixels for the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...transport.messages.images import MAX_IMAGES, MAX_PIXEL_BYTES, Image, image_name, image_token_ids
from ..errors import ContextTooLong, ImagesWanted, WrongField
from ..images.reading import MAX_PIXELS_IN_ALL, decoded, opened, prepared
from ..images.rules import ImageRules, NoImages
from ..text.served_model import ServedModel
from .bodies.content import ImagePart
from .bodies.messages import Message

Found = Sequence[tuple[str, ImagePart]]
"""The images of a chat, each with the path of its message's content."""


TOO_MANY_PIXELS = (
    f"as the model takes them, the images have more than {MAX_PIXEL_BYTES >> 20} MiB of pixels together; "
    "send fewer"
)


class ImagePrompt(NamedTuple):
    token_ids: list[int]
    images: tuple[Image, ...]


def images_of(messages: Iterable[Message]) -> Found:
    """Return the images of a chat in their order."""
    return [(f"messages[{i}].content", part) for i, each in enumerate(messages) for part in each.images]


def rules_for(found: Found, model: ServedModel) -> ImageRules:
    """Raises InvalidRequest if the model takes no images, or not as many."""
    if isinstance(rules := model.images, NoImages):
        why = f": {rules.why}" if rules.why else ""
        raise WrongField(found[0][0], f"the model {model.name!r} takes no images{why}")
    if len(found) > MAX_IMAGES:
        raise WrongField("messages", f"there are {len(found)} images; a request may have {MAX_IMAGES}")
    return rules


def check_here(found: Found) -> None:
    """Raises ImagesWanted unless all images are here."""
    if wanted := [(f"{path}[{part.number}].image_url", part.url) for path, part in found if part.url]:
        raise ImagesWanted(wanted)


def put_in(messages: Iterable[Message], fetched: Mapping[str, bytes]) -> None:
    """Put the files that were fetched, by address, into the messages that name them."""
    for message in messages:
        if any(part.url for part in message.images):
            message.content = tuple(
                part._replace(data=fetched[part.url], url="")
                if isinstance(part, ImagePart) and part.url in fetched
                else part
                for part in message.content
            )


def check_marks(token_ids: Sequence[int], num_images: int, rules: ImageRules) -> None:
    """Raises InvalidRequest unless the prompt has as many marks of images as there are images."""
    if (count := token_ids.count(rules.token_id)) != num_images:
        raise WrongField(
            "messages",
            f"the prompt has {count} times {rules.token} for {num_images} images; no text may have it, and "
            "the chat template must write it for each image",
        )


def with_images(token_ids: Sequence[int], found: Found, rules: ImageRules, most: int) -> ImagePrompt:
    """Put the tokens of each image in place of its mark; see ``check_marks``.

    Raises InvalidRequest if an image cannot be read, and ContextTooLong above ``most`` tokens.
    """
    ids, images, at, room = list[int](), list[Image](), 0, MAX_PIXEL_BYTES
    num_looked_at = 0
    for path, part in found:
        mark = token_ids.index(rules.token_id, at)
        ids += token_ids[at:mark]
        at = mark + 1
        try:
            picture = opened(decoded(part.data) if isinstance(part.data, str) else part.data)
            if (num_looked_at := num_looked_at + picture.width * picture.height) > MAX_PIXELS_IN_ALL:
                raise ValueError(f"with those before it has more than {MAX_PIXELS_IN_ALL:,} pixels")
            picture = prepared(picture, rules.fitted)
        except ValueError as error:
            raise WrongField(path, f"part {part.number} is an image, but {error}") from error
        height, width = picture.height, picture.width
        if (room := room - 3 * height * width) < 0:
            raise WrongField("messages", TOO_MANY_PIXELS)
        pixels = picture.tobytes()
        rows, columns = height // rules.side, width // rules.side
        name = image_name(height, width, pixels)
        own = iter(image_token_ids(name, rows * columns).tolist())
        tokens = [next(own) if one is None else one for one in rules.layout(rows, columns)]
        images.append(
            Image(
                first=len(ids),
                num_tokens=len(tokens),
                height=height,
                width=width,
                pixels=pixels,
                name=name,
                num_positions=rules.num_positions(rows, columns),
            )
        )
        ids += tokens
        if len(ids) > most:
            raise ContextTooLong(most, len(ids), None, param="messages", at_least=True)
    return ImagePrompt([*ids, *token_ids[at:]], tuple(images))
