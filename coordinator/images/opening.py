"""Makes the fetcher of images, where the settings ask for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..http.overload import Overload
from .hosts import ImageHosts

if TYPE_CHECKING:
    from .fetching import ImageFetcher


def fetcher_of(hosts: ImageHosts | None, max_bytes: int, overload: Overload) -> ImageFetcher | None:
    """See ``ImageFetcher``. None: no host is listed."""
    if hosts is None:
        return None
    from .fetching import ImageFetcher  # imports httpx, which most servers start without

    return ImageFetcher(hosts, max_bytes, overload)
