"""Chat templates: Jinja, in a sandbox, with Hugging Face's conventions.

The template comes with the model, the messages from anyone. The sandbox allows neither attribute access to internals nor changes
to what it is given; ``range`` and the number and size of messages are bounded, so the time a render takes is too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .api_types import Message
from .errors import InvalidRequest
from .tokenizer import Tokenizer, read_json


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's words for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML; models have not seen that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        """Raises ValueError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # a chain of maps otherwise, which each render would walk
        except TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens or {}
        self._knows_developer = "developer" in source

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """From ``chat_template.jinja`` or ``tokenizer_config.json``; None if the model has none."""
        path = folder / "chat_template.jinja"
        source = path.read_text() if path.is_file() else read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return cls(source, tokenizer.special_tokens()) if source else None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, extra: dict[str, Any] | None = None) -> str:
        """The prompt; ``extra`` are further variables. Raises InvalidRequest with the template's own words if it refuses the messages."""
        variables = {"add_generation_prompt": add_generation_prompt, **self._special_tokens, **(extra or {})}
        variables["messages"] = [self._as_dict(message) for message in messages]
        try:
            return self._template.render(variables)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"The model's chat template refused the messages: {error}", param="messages") from error

    def _as_dict(self, message: Message) -> dict[str, Any]:
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"  # what it was called before
        fields = {"name": message.name, "tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
        return {"role": role, "content": message.content or "", **{key: value for key, value in fields.items() if value is not None}}
