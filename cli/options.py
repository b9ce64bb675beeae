"""Command-line options made from settings models: one option a field, with its text, bounds and default."""

from __future__ import annotations

import enum
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .config import Layer, Value, flag_of


class SettingOption(click.Option):
    """An option for one field; ``group`` is the heading it stands under in the help."""

    def __init__(self, name: str, field: FieldInfo, *, group: str, hidden: bool, text: str) -> None:
        flag = flag_of(name)
        is_bool = field.annotation is bool
        super().__init__(
            [f"{flag}/--no-{flag[2:]}" if is_bool else flag, name],
            help=text or f"{field.description}{facts(field)}",
            default=None,
            type=bool if is_bool else str,
            is_flag=is_bool,
            metavar=None if is_bool else metavar(field),
            hidden=hidden,
        )
        self.group = group


class SettingsCommand(click.Command):
    """A command whose help lists its options under their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)  # the usage line shows those
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def options(
    model: type[BaseModel],
    *,
    group: str = "Options",
    prefix: str = "",
    skip: Collection[str] = (),
    hidden: bool = False,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> list[click.Parameter]:
    """One option for each field of ``model`` but those in ``skip``; ``texts`` replaces help texts."""
    return [
        SettingOption(prefix + name, field, group=group, hidden=hidden, text=texts.get(name, ""))
        for name, field in model.model_fields.items()
        if name not in skip
    ]


def given(flags: Mapping[str, Any]) -> Layer:
    """The flags that were really given, as a layer of settings."""
    return {name: Value(value, flag_of(name)) for name, value in flags.items() if value is not None}


def metavar(field: FieldInfo) -> str:
    """What stands for the value in help and reference: ``INTEGER``, ``[auto|shm|tcp]``."""
    kind = _plain(field.annotation)
    if get_origin(kind) is Literal:
        return f"[{'|'.join(get_args(kind))}]"
    names = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", bool: "BOOLEAN"}
    return names.get(kind, "TEXT")


def bounds(field: FieldInfo) -> str:
    """``1 to 4096``, ``above 0, at most 600``; empty where there are none."""
    low = high = ""
    inclusive = True
    for rule in field.metadata:
        if isinstance(rule, Ge):
            low = f"{rule.ge}"
        elif isinstance(rule, Gt):
            low, inclusive = f"above {rule.gt}", False
        elif isinstance(rule, (Le, Lt)):
            high = f"{rule.le}" if isinstance(rule, Le) else f"below {rule.lt}"
    if low and high:
        return f"{low} to {high}" if inclusive else f"{low}, at most {high}"
    return f"at least {low}" if low and inclusive else low or high


def default(field: FieldInfo) -> str:
    """The default as written; empty where the description tells it or the setting is needed."""
    value = field.default
    if value is PydanticUndefined or value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, enum.Enum) else value)


def facts(field: FieldInfo) -> str:
    """`` [default: 16; 1 to 4096]`` as it follows a description."""
    parts = [f"default: {text}" if (text := default(field)) else "", bounds(field)]
    if field.is_required():
        parts.append("needed")
    said = "; ".join(part for part in parts if part)
    return f"  [{said}]" if said else ""


def _plain(annotation: Any) -> Any:
    """``int`` of ``int | None``."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(kind for kind in get_args(annotation) if kind is not type(None))
    return annotation
