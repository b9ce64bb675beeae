"""Sources of settings: a flag, an environment variable, one YAML file, the default. The first that has a
setting wins.

    --max-queue 64                        flag
    SPLITSERVE_COORDINATOR_MAX_QUEUE=64   environment, for one command
    SPLITSERVE_MAX_QUEUE=64               environment, for every command that has such a setting
    coordinator: {max_queue: 64}          file, for one command
    common: {max_queue: 64}               file, for every command that has such a setting

All names in the file and all variables that begin with SPLITSERVE_ are checked, whichever command runs: a
misspelt one is an error that names the nearest known one. Skipped are the variables that Kubernetes sets in
every pod for a Service whose name begins with "splitserve".
"""

from __future__ import annotations

import difflib
import os
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ..transport.process.private_files import OpenToOthers, require_private


class Sections(Mapping[str, type[BaseModel]]):
    """Settings model by section. Each is imported when it is first asked for: a worker needs only its own."""

    def __init__(self, models: Mapping[str, str]) -> None:
        self._models = models  # MODULE:CLASS

    def __getitem__(self, section: str) -> type[BaseModel]:
        model: type[BaseModel] = pkgutil.resolve_name(f"splitserve.{self._models[section]}")
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, section: object) -> bool:
        return section in self._models


SECTIONS = Sections(
    {
        "coordinator": "cli.settings:ServerSettings",
        "prefill": "worker.settings:PrefillSettings",
        "decode": "worker.settings:DecodeSettings",
        "worker": "worker.settings:FlexibleSettings",
        "up": "cli.settings:UpSettings",
        "chat": "cli.settings:ChatSettings",
        "top": "cli.settings:TopSettings",
        "doctor": "cli.settings:DoctorSettings",
        "flip": "cli.settings:FlipSettings",
        "bench": "loadgen.settings:LoadSettings",
        "usage": "cli.usage:UsageSettings",
        "keys_create": "cli.key_settings:KeysCreateSettings",
        "keys_list": "cli.key_settings:KeysListSettings",
        "keys_rotate": "cli.key_settings:KeysRotateSettings",
        "keys_revoke": "cli.key_settings:KeysRevokeSettings",
        "keys_tenant": "cli.key_settings:KeysTenantSettings",
        "keys_tier": "cli.key_settings:KeysTierSettings",
        "profile": "planner.settings:ProfileSettings",
        "simulate": "planner.settings:SimulateSettings",
        "plan": "planner.settings:PlanSettings",
        "trace_stats": "traces.settings:TraceStatsSettings",
        "trace_convert": "traces.settings:TraceConvertSettings",
        "trace_make": "traces.settings:TraceMakeSettings",
        "trace_fit": "traces.settings:TraceFitSettings",
    }
)
COMMON = "common"
ENV_PREFIX = "SPLITSERVE_"
CONFIG_VARIABLE = "SPLITSERVE_CONFIG"
SERVICE_VARIABLE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
"""Variables that Kubernetes sets for a Service, except NAME_PORT: that can be a setting's name, so its value
decides."""
SERVICE_PORT_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+$")
PASSWORD = re.compile(r"://[^/?#@]*:[^/?#@]+@|[?&]\w*(key|password|secret|sig|token)\w*=", re.IGNORECASE)
"""In a URL."""

Settings = TypeVar("Settings", bound=BaseModel)


class ConfigError(Exception):
    """A setting that cannot be used. The message has its name, its origin and the allowed values."""


class CommandError(Exception):
    """A command cannot go on. The message is for the user; the exit status is 1."""


@dataclass(frozen=True, slots=True)
class Value:
    """A setting as given, and its origin: a flag, a variable, a place in a file."""

    value: Any
    origin: str


Layer = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Sources:
    """The environment and the file, read and checked once."""

    layers: dict[str, list[Layer]]  # by section, strongest first

    @classmethod
    def read(cls, config: Path | None = None, env: Mapping[str, str] = os.environ) -> Sources:
        """Reads ``config`` (or the file that SPLITSERVE_CONFIG names). Raises ConfigError."""
        if config is None and CONFIG_VARIABLE in env:
            config = Path(env[CONFIG_VARIABLE])
        of_env, of_file = _from_env(env), _from_file(config) if config else {}
        layers: dict[str, list[Layer]] = {
            section: [
                layer
                for source in (of_env, of_file)
                for name in (section, COMMON)
                if (layer := source.get(name))
            ]
            for section in SECTIONS
        }
        return cls(layers)

    def of(self, section: str) -> list[Layer]:
        """Return the layers of a section, strongest first; of ``common`` only the section's settings."""
        fields = SECTIONS[section].model_fields
        return [
            {name: value for name, value in layer.items() if name in fields} for layer in self.layers[section]
        ]


def load(section: str, flags: Layer, sources: Sources) -> BaseModel:
    """The settings of one command. Raises ConfigError."""
    return build(SECTIONS[section], [flags, *sources.of(section)])


def build(model: type[Settings], layers: Sequence[Layer]) -> Settings:
    """``model`` from layers of values, strongest first. Raise ConfigError that names the origin of a wrong
    value."""
    chosen: dict[str, Value] = {}
    for layer in reversed(layers):
        chosen.update(layer)
    try:
        return model(**{name: value.value for name, value in chosen.items()})
    except ValidationError as error:
        sentences = (_sentence(problem, chosen, model) for problem in error.errors())
        raise ConfigError("\n".join(dict.fromkeys(sentences))) from None


def _sentence(problem: Mapping[str, Any], chosen: Mapping[str, Value], model: type[BaseModel]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    if problem["type"] == "missing":
        return (
            f"{flag_of(name)} is needed: {variable_of(name)} or a line `{name}:` in the configuration "
            "file do as well"
        )
    of_union = len(problem["loc"]) == 2 and isinstance(problem["loc"][1], str)  # a problem for each type
    if of_union or problem["type"] == "string_pattern_mismatch":  # the pattern is for machines
        field = model.model_fields[name]
        example = f" Such as {field.default}." if field.default and not field.is_required() else ""
        message = f"it has the wrong form. {field.description}{example}"
    message = message[0].lower() + message[1:]
    return f"{chosen[name].origin}: {chosen[name].value!r} cannot be used: {message}"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str, section: str = "") -> str:
    return ENV_PREFIX + (f"{section}_{name}" if section else name).upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'max_queue'?``, or nothing if no known name is near."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def known_names() -> dict[str, list[str]]:
    """The settings of every section; ``common`` has them all."""
    names = {section: list(model.model_fields) for section, model in SECTIONS.items()}
    return {**names, COMMON: list(dict.fromkeys(name for fields in names.values() for name in fields))}


def _from_env(env: Mapping[str, str]) -> dict[str, dict[str, Value]]:
    """Return the settings that variables give, by section."""
    given = {
        variable: text
        for variable, text in env.items()
        if variable.startswith(ENV_PREFIX)
        and variable != CONFIG_VARIABLE
        and not _is_of_a_service(variable, text)
    }
    if not given:
        return {}  # known_names imports the settings of every command
    places = {
        variable_of(name, "" if section == COMMON else section): (section, name)
        for section, fields in known_names().items()
        for name in fields
    }
    found: dict[str, dict[str, Value]] = {}
    for variable, text in given.items():
        if variable not in places:
            raise ConfigError(
                f"environment variable {variable} is not a "
                f"setting{nearest(variable, [*places, CONFIG_VARIABLE])}"
            )
        section, name = places[variable]
        found.setdefault(section, {})[name] = Value(text, variable)
    return found


def _is_of_a_service(variable: str, text: str) -> bool:
    """Whether Kubernetes has set this variable for one of its Services."""
    return SERVICE_VARIABLE.search(variable) is not None or (
        variable.endswith("_PORT") and SERVICE_PORT_VALUE.match(text) is not None
    )


def _from_file(path: Path) -> dict[str, dict[str, Value]]:
    """Return the settings that the YAML file gives, by section."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {_reason(error)}") from None
    found: dict[str, dict[str, Value]] = {}
    known = known_names()
    for section, fields in _mapping(content, f"{path}").items():
        if section not in known:
            advice = nearest(str(section), known) or f"; sections are: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown section {section!r}{advice}")
        for name, value in _mapping(fields, f"{path}: {section}").items():
            if name not in known[section]:
                raise ConfigError(
                    f"{path}: unknown setting {name!r} in section "
                    f"{section!r}{nearest(str(name), known[section])}"
                )
            found.setdefault(section, {})[name] = Value(value, f"{path}: {section}.{name}")
            _check_private(path, f"{section}.{name}", value)
    return found


def _check_private(path: Path, setting: str, value: Any) -> None:
    """Raises ConfigError where other users may read a password in this file."""
    if isinstance(value, str) and PASSWORD.search(value):
        try:
            require_private(f"{setting} holds a password or key, and its file", [path])
        except OpenToOthers as error:
            raise ConfigError(str(error)) from None


def _reason(error: Exception) -> str:
    """On one line, with the place in the file where there is one."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return str(getattr(error, "strerror", None) or error)


def _mapping(content: Any, place: str) -> dict[Any, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: should hold `name: value` lines, not {content!r:.60}")
    return content
