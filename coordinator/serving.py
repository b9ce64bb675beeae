"""The models that one coordinator serves. Each has workers, a queue and counts of its own; requests, limits
and pages name one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request

from .errors import RETRY_AFTER_S, ApiError, NotFound, Overloaded, no_workers, on_route
from .lifecycle.request import Fleet
from .metrics.metrics import Metrics
from .metrics.system_snapshot import SystemSnapshot
from .text.served_model import ServedModel, ServedModels


class Served(NamedTuple):
    """A model, what has it served, and its state, which is asked for at each scrape of /metrics."""

    model: ServedModel
    dispatcher: Fleet
    system: Callable[[], SystemSnapshot]


@dataclass(frozen=True, slots=True)
class Serving:
    """The same, with its counts."""

    model: ServedModel
    dispatcher: Fleet
    system: Callable[[], SystemSnapshot]
    metrics: Metrics

    def require_workers(self, route: str = "") -> None:
        """Raises Unavailable where new requests are refused. ``route``: by which the request came."""
        if gap := self.dispatcher.gap():
            error = no_workers(gap)
            raise on_route(route, self.model.name, error) if route else error

    def refusal(self) -> ApiError | None:
        """Return the error that a new request would get now, whatever it asks for; None: it is taken."""
        if gap := self.dispatcher.gap():
            return no_workers(gap)
        if full := self.dispatcher.full():
            return Overloaded(full, retry_after_s=RETRY_AFTER_S)
        return None


class Servings:
    """All of them; the first is meant where none is named."""

    def __init__(self, servings: Iterable[Serving]) -> None:
        self.all = tuple(servings)
        self.first = self.all[0]
        self._by_name = by_name = {serving.model.name: serving for serving in self.all}
        self.models = ServedModels(
            (serving.model for serving in self.all), lambda model: by_name[model.name].refusal()
        )

    def of(self, name: str | None) -> Serving:
        """Return what serves this name. Raises as ``ServedModels.of``."""
        return self._by_name[self.models.of(name).name]

    def metrics_of(self, name: str | None) -> Metrics:
        """Return the counts for a request of this name; the first model's where none is served by it."""
        with suppress(ApiError):
            return self.of(name).metrics
        return self.first.metrics

    def asked(self, request: Request) -> Serving:
        """Return the one that a page is asked about: ``?model=NAME``. Raises NotFound."""
        name = request.query_params.get("model")
        for serving in self.all:
            if name is None or name in serving.model.names:
                return serving
        raise NotFound(
            f"There is no model {name!r:.200}; there are: {', '.join(self._by_name)}.", param="model"
        )

    @property
    def num_open(self) -> int:
        """HTTP requests for tokens that have not ended, of all models."""
        return sum(serving.metrics.num_open for serving in self.all)
