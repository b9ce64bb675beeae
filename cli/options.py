"""Command-line options made from settings models: one option a field, with its text, bounds and default."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .config import Layer, Value, flag_of, nearest

MAX_SHOWN = 30
"""A command with more options shows the everyday ones, and all of them with --help-all."""
HELP_ALL = "help_all"
EVERYDAY = frozenset(
    """
    prefill decode flexible chat prompt model served_model_name host port control_address
    key_file insecure
    max_model_len max_queue steer tenants_file open_access tls_cert tls_key admin_port processes batch_file
    log_level log_requests name coordinator device dtype exact threads mover max_num_seqs max_batch_tokens
    tensor_parallel_size gpu_memory_utilization kv_cache_gib lora_folder listen data_listen advertise_host
    start_as
    """.split()  # noqa: SIM905
)
"""Options that a person sets up a server with."""


FILE_ONLY = frozenset({"pools", "other_models"})
"""Settings that are too large for an option."""


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
        self.brief = (flag if metavar(field) == "BOOLEAN" else f"{flag} {metavar(field)}", brief(text, field))


class SettingsCommand(click.Command):
    """A command whose help lists its options under their groups: of many only the everyday ones, without
    --help-all. ``make_params`` is called when the parameters are first asked for: only the command that runs
    imports its settings."""

    def __init__(
        self, name: str, make_params: Callable[[], list[click.Parameter]], **attributes: Any
    ) -> None:
        super().__init__(name, **attributes)
        self._make_params = make_params

    @cached_property
    def _params(self) -> list[click.Parameter]:
        params = self._make_params()
        is_long = sum(not getattr(parameter, "hidden", False) for parameter in params) > MAX_SHOWN
        return [*params, *([_help_all()] if is_long else [])]

    @property
    def params(self) -> list[click.Parameter]:
        return self._params

    @params.setter
    def params(self, _: list[click.Parameter]) -> None:
        """Ignored: ``click.Command`` assigns the parameters that it was made with, none here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:  # click would list near ones by the alphabet
            near = nearest(error.option_name, error.possibilities or ())
            raise click.UsageError(f"No such option {error.option_name!r}{near}", ctx) from None
        except click.UsageError as error:
            named = error.message.startswith("Got unexpected") and any(p.name == "model" for p in self.params)
            raise click.UsageError(
                f"{error.message}{'; give a model as --model MODEL' * named}", ctx
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        is_short = any(parameter.name == HELP_ALL for parameter in self.params) and HELP_ALL not in ctx.meta
        for parameter in self.get_params(ctx):
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)
            if record is None:  # an argument, which the usage line shows, or a hidden option
                continue
            if is_short and isinstance(parameter, SettingOption):
                if parameter.name not in EVERYDAY:
                    continue
                record = parameter.brief
            groups.setdefault(getattr(parameter, "group", "Other options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def _help_all() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked:
            ctx.meta[HELP_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    return click.Option(
        ["--help-all", HELP_ALL],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show every option, with its bounds, and exit.",
    )


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
        if name not in skip and name not in FILE_ONLY
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
    """Return the default as written; empty where the description has it or the setting is needed."""
    value = field.default
    if value is PydanticUndefined or value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, enum.Enum) else value)


def brief(text: str, field: FieldInfo) -> str:
    """Return the first clause of a description, and the default."""
    clause = re.split(r"[.;:] ", text or field.description or "")[0].rstrip(".")
    shown = "" if text else default(field)  # a command's own text has its default
    return f"{clause}." + (f"  [{shown}]" if shown not in ("", "off") else "")


def facts(field: FieldInfo) -> str:
    """`` [default: 16; 1 to 4096]`` as it follows a description."""
    parts = [f"default: {text}" if (text := default(field)) else "", bounds(field)]
    if field.is_required():
        parts.append("needed")
    facts_shown = "; ".join(part for part in parts if part)
    return f"  [{facts_shown}]" if facts_shown else ""


def _plain(annotation: Any) -> Any:
    """``int`` of ``int | None``."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(kind for kind in get_args(annotation) if kind is not type(None))
    return annotation
