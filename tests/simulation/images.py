"""Images in prompts. The model reads at each of an image's tokens one of its features, and with every token
how its rope position differs from its place: the wrong features or positions give other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from splitserve.coordinator.lifecycle.request import Request
from splitserve.engine.step.batch import Batch
from splitserve.transport.messages.images import (
    FIRST_IMAGE_ID,
    Image,
    image_name,
    image_token_ids,
    rope_positions,
)

SHARE = 0.5  # of requests that have images where the model takes them
GRIDS = ((2, 3), (1, 5), (3, 1))  # rows and columns of the pictures that there are
PLACES = (0, 0, 4, 7)  # in the prompt
OF_AXES = ((1_009, 0, 0), (0, 10_007, 0), (0, 0, 100_003))


def choose(draw: Random, request: Request, takes_images: bool) -> None:
    """Give a request one image or two, which it may share with others; or none."""
    if draw.random() >= SHARE * takes_images or request.prompt_logprobs is not None:
        return
    ids, images = list(request.prompt_token_ids), list[Image]()
    for _ in range(draw.choice((1, 1, 2))):
        end = images[-1].end if images else 0
        first = min(len(ids) - 1, end + draw.choice(PLACES))
        number = draw.randrange(len(GRIDS))
        rows, columns = GRIDS[number]
        pixels = bytes([number + 1]) * (3 * rows * columns)
        name = image_name(rows, columns, pixels)
        ids[first:first] = image_token_ids(name, rows * columns).tolist()
        images.append(
            Image(
                first=first,
                num_tokens=rows * columns,
                height=rows,
                width=columns,
                pixels=pixels,
                name=name,
                num_positions=max(rows, columns),
            )
        )
    request.prompt_token_ids, request.images = ids, tuple(images)


def read_prompt(request: Request) -> list[int]:
    """Return what the model reads of its prompt."""
    tokens = np.array(request.prompt_token_ids, np.int64)
    for image in request.images:
        tokens[image.first : image.end] = _features(image, 0, image.num_tokens)
    rope = rope_positions(request.images, len(tokens))
    return _turned(tokens, np.arange(len(tokens)), rope)


def read_output(request: Request, token: int) -> int:
    """Return what the model reads of a token of its answer."""
    shift = sum(image.num_positions - image.num_tokens for image in request.images)
    return token + shift * sum(map(sum, OF_AXES))


def as_read(batch: Batch, token_ids: Sequence[int]) -> list[int]:
    """Return what the model reads of a step's tokens. An image's token without its feature is another's."""
    tokens = np.array(token_ids, np.int64)
    for part in batch.images:
        assert (tokens[part.row : part.row + part.count] >= FIRST_IMAGE_ID).all()
        tokens[part.row : part.row + part.count] = _features(part.image, part.skipped, part.count)
    assert (tokens < FIRST_IMAGE_ID).all(), "a token of an image comes without it"
    if batch.rope is None:
        return list(token_ids) if not batch.images else tokens.tolist()
    return _turned(tokens, batch.positions, batch.rope)


def _features(image: Image, first: int, count: int) -> NDArray[np.int64]:
    return 50_000 * image.pixels[0] + np.arange(first, first + count, dtype=np.int64)


def _turned(
    tokens: NDArray[np.int64], positions: NDArray[np.int32], rope: NDArray[np.int32] | None
) -> list[int]:
    if rope is None:
        return list(tokens.tolist())
    axes = np.broadcast_to(rope, (3, len(tokens))) - positions
    return list((tokens + (np.array(OF_AXES) @ axes).sum(0)).tolist())
