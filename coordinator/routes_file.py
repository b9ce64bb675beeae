"""The file of routes, which is followed: shares are changed by replacing it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import CannotStart
from .text.model_route import ModelRoute
from .text.served_model import ServedModel, ServedModels

Name = Annotated[str, Field(min_length=1, max_length=256)]
Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_log = logging.getLogger(__name__)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class RouteFields(_Strict):
    """One route, as the file has it."""

    name: Name
    shares: Annotated[dict[Name, Weight], Field(min_length=1, max_length=64)]
    fallbacks: Annotated[list[Name], Field(max_length=64)] = []
    shadow: Name | None = None
    shadow_percent: Annotated[float, Field(ge=0, le=100)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.shadow is None) != (self.shadow_percent is None):
            raise ValueError("give `shadow` and `shadow_percent` together")
        if not any(self.shares.values()):
            raise ValueError("shares: one must be above 0")
        return self


class RoutesFields(_Strict):
    """The whole file."""

    routes: Annotated[list[RouteFields], Field(max_length=1024)]


class RoutesFile:
    """Gives ``models`` the routes of a file."""

    def __init__(self, path: Path, models: ServedModels) -> None:
        """Raises CannotStart."""
        self._path, self._models = path, models
        self._seen: tuple[int, int, int] | None = None
        try:
            found = self.refresh()
        except (OSError, ValueError) as error:
            raise CannotStart(f"--routes-file: {error}") from error
        _log.info("routes of %s: %s", path, found or "none")

    def refresh(self) -> str:
        """Go by the file where it has changed; return its routes. Raises OSError or ValueError, and then the
        routes stay as they are."""
        now = self._path.stat()
        seen = (now.st_ino, now.st_size, now.st_mtime_ns)
        if seen == self._seen:
            return ""
        routes = routes_of(self._path, self._models)
        self._seen = seen
        if routes == self._models.routes:
            return ""
        self._models.routes = routes
        return "; ".join(map(str, routes.values())) or "none"


def routes_of(path: Path, models: ServedModels) -> dict[str, ModelRoute]:
    """Read a file. Raises OSError, or ValueError with a sentence."""
    try:
        content = _read(path)
        if not isinstance(content, dict):
            raise ValueError("it must hold `routes:` and a list; without routes `routes: []`")
        fields = RoutesFields.model_validate(content)
        routes = dict[str, ModelRoute]()
        for each in fields.routes:
            if each.name in routes:
                raise ValueError(f"two routes have the name {each.name!r}")
            routes[each.name] = _route_of(each, models)
        return routes
    except ValidationError as error:
        raise ValueError(f"{path}: {_sentence(error)}") from error
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ValueError(f"{path}: {place}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # also bytes that are no UTF-8
        raise ValueError(f"{path}: {error}") from error


def _read(path: Path) -> object:
    """Raises OSError, YAMLError or ValueError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (RecursionError, LookupError, AttributeError, TypeError) as error:  # the library's, unmapped
        fault = "it is too deep" if isinstance(error, RecursionError) else "a value is not of its !!type"
        raise ValueError(f"{fault}: a file of routes is a plain list") from error


def _route_of(fields: RouteFields, models: ServedModels) -> ModelRoute:
    """Raises ValueError."""
    if fields.name in models.own:
        raise ValueError(f"the route {fields.name!r} has the name of a model; give it another")

    def own(name: str) -> str:
        if name not in models.own:
            there_are = ", ".join(models.own)
            raise ValueError(
                f"the route {fields.name!r} names {name!r}, which is no model here (adapters and routes "
                f"cannot be named); there are: {there_are}"
            )
        return models.own[name].name

    shares = dict[str, float]()
    for name, weight in fields.shares.items():
        if own(name) in shares:
            raise ValueError(f"the route {fields.name!r} has two shares of the model {own(name)!r}")
        shares[own(name)] = weight
    shadow = "" if fields.shadow is None else own(fields.shadow)
    fallbacks = tuple(map(own, fields.fallbacks))
    route = ModelRoute(fields.name, shares, fallbacks, shadow, fields.shadow_percent or 0.0)
    if shadow:
        for name in route.targets:
            if what := _unlike(models.own[name], models.own[shadow]):
                raise ValueError(
                    f"the route {fields.name!r} has the shadow {shadow!r}, which gets the tokens of {name!r} "
                    f"but has {what}"
                )
    return route


def _unlike(model: ServedModel, shadow: ServedModel) -> str:
    """Return why a model's tokens mean nothing to its shadow, or its answers cannot be compared; empty: they
    do, and can."""
    if shadow.embeddings.alone:
        return "no head (lm_head): only answers are compared"
    if model.tokenizer.table.pieces != shadow.tokenizer.table.pieces:
        return "another tokenizer"
    if model.template_source != shadow.template_source:
        return "another chat template"
    return "" if model.images == shadow.images else "other rules for images"


def _sentence(error: ValidationError) -> str:
    """Return the first fault and its place."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


class _Loader(yaml.SafeLoader):  # the faster CSafeLoader's process ends on 200,000 brackets
    """Refuses a key that stands twice: YAML's own loader takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", mark)
        return super().construct_mapping(node, deep)
