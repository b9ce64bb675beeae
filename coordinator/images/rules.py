"""How a model takes images: to which size they are resized, and which tokens stand for one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from ...transport.messages.images import MAX_PIXEL_BYTES
from .reading import BICUBIC

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MOST_PIXELS = MAX_PIXEL_BYTES // 3


class NoImages(NamedTuple):
    """``why`` the model takes no images; empty: it has no part for them."""

    why: str = ""

    def bounded_by(self, bound: int | None) -> Self:
        """See ``ImageRules``."""
        if bound is not None:
            raise ValueError(f"--image-max-pixels {bound}: the model takes no images")
        return self


@dataclass(frozen=True, slots=True)
class ImageRules(ABC):
    """Rows and columns are those of an image's features."""

    token: str
    """Written by the chat template where an image stands."""
    token_id: int
    side: int
    """Pixels of the square that becomes one feature."""
    bound: int | None = field(default=None, kw_only=True)
    """The server's own bound of an image's pixels. None: the model's holds alone."""

    @abstractmethod
    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to; black rows and columns follow up to
        multiples of ``side``. Raises ValueError."""

    def layout(self, rows: int, columns: int) -> list[int | None]:
        """Return the ids of an image's tokens; None: one with a feature."""
        return [None] * (rows * columns)

    def num_positions(self, rows: int, columns: int) -> int:
        """Return ``Image.num_positions``."""
        return 0

    @property
    def least(self) -> int:
        """Pixels that each image has at least."""
        return self.side * self.side

    def bounded_by(self, bound: int | None) -> Self:
        """Return the rules of a server with a bound of its own. Raises ValueError."""
        if bound is not None and bound < self.least:
            raise ValueError(f"--image-max-pixels {bound}: the model's images have {self.least} or more")
        return replace(self, bound=bound)

    def fitted(self, picture: Picture) -> Picture:
        """Return an image in RGB as the model takes it. Raises ValueError."""
        from PIL import Image

        height, width = self.bounded_size(picture.height, picture.width)
        found = picture.resize((width, height), BICUBIC)
        if (whole := self._filled(height, width)) == (height, width):
            return found
        canvas = Image.new("RGB", whole[::-1])
        canvas.paste(found)
        return canvas

    def bounded_size(self, height: int, width: int) -> tuple[int, int]:
        """Return ``size`` within ``bound``, of an image that a request has room for. Raises ValueError."""
        size = self.size(height, width)
        if self.bound is not None and math.prod(self._filled(*size)) > self.bound:
            size = self._shrunk(height, width, self.bound)
        if math.prod(self._filled(*size)) > MOST_PIXELS:
            raise ValueError(f"it would have {size[0]} x {size[1]} pixels for the model, too many")
        return size

    def _filled(self, height: int, width: int) -> tuple[int, int]:
        return -(-height // self.side) * self.side, -(-width // self.side) * self.side

    def _shrunk(self, height: int, width: int, bound: int) -> tuple[int, int]:
        """Return a size of at most ``bound`` pixels, about of an image's shape."""
        shrink, most = math.sqrt(height * width / bound), bound // self.side**2
        rows = min(most, max(1, math.floor(height / shrink / self.side)))
        columns = min(most // rows, max(1, math.floor(width / shrink / self.side)))
        return rows * self.side, columns * self.side
