"""Chat templates: Jinja, in a sandbox, with Hugging Face's conventions.

The template comes with the model, the messages from anyone. The sandbox allows neither attribute access to
internals nor changes to what it is given; ``range`` and the number and size of messages are bounded, so the
time a render takes is too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest, WrongField
from .tokenizer import Tokenizer, read_json

REFUSALS = (
    *(TemplateError, ArithmeticError, LookupError, TypeError),
    *(ValueError, AttributeError, RecursionError),
)
"""What a template may raise for messages that it does not take."""


END_MARK = "\ue000\uf8ff\ue000"
"""Stands at the end of a message that is to go on; of characters for private use, which no message has."""


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


class Arguments(dict[str, Any]):
    """A call's arguments: templates read them as an object or, joined with text, as their JSON text."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        """Raises ValueError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            # a plain dict, not the chain of maps that each render would walk
            self._template.globals = dict(self._template.globals)
        except TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens or {}
        self.source = source
        self._knows_developer = "developer" in source
        self._knows_tools = "tools" in source
        self._knows_thinking = "thinking" in source
        self._reads_tools_of_message = re.search(r"message(\.tools\b|\[.tools.\])", source) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self._special_tokens)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """From ``chat_template.jinja`` or ``tokenizer_config.json``; None if the model has none. Raises
        ValueError."""
        path = folder / "chat_template.jinja"
        try:
            source = (
                path.read_text("utf-8")
                if path.is_file()
                else read_json(folder / "tokenizer_config.json").get("chat_template")
            )
            if isinstance(source, list):  # several, by name
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            return cls(source, tokenizer.special_tokens()) if source else None
        except (TypeError, LookupError, ValueError) as error:
            raise ValueError(
                f"{folder}: its chat template cannot be read ({error}); copy it again"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Render the prompt.

        ``messages`` are as Hugging Face templates take them; ``extra`` holds further variables of the
        template. ``continue_final_message``: the prompt ends with the last message's content. Raises
        InvalidRequest with the template's own words if it refuses the messages.
        """
        if continue_final_message:
            messages = [*messages[:-1], _extended(messages[-1], END_MARK)]
        variables = {"add_generation_prompt": add_generation_prompt, **self._special_tokens, **(extra or {})}
        variables["messages"] = [self._with_known_fields(message) for message in messages]
        if tools and self._reads_tools_of_message:
            variables["messages"] = _with_tools_field(variables["messages"], tools)
        elif tools and self._knows_tools:
            variables["tools"] = tools
        elif tools:
            variables["messages"] = _with_tools(variables["messages"], tools)
        try:
            text = self._template.render(variables)
        except REFUSALS as error:
            raise InvalidRequest(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error
        if not continue_final_message:
            return text
        text, found, _ = text.rpartition(END_MARK)
        if not found:
            raise WrongField("continue_final_message", "the chat template leaves the last message out")
        return text

    def _with_known_fields(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the role ``developer`` to ``system`` for templates that do not know it. A thought is also
        ``thinking``, as gpt-oss has it, unless a message of calls has content, too."""
        role, thought = message["role"], message.get("reasoning_content")
        known = {**message, "role": "system" if role == "developer" and not self._knows_developer else role}
        if thought and self._knows_thinking and not (message["content"] and message.get("tool_calls")):
            known["thinking"] = thought
        return known


def _extended(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a message with more text at the end of its content."""
    content = message["content"]
    more = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return {**message, "content": more}


def _with_tools_field(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Put the functions into a field of the system message, where Phi-4's template looks for them."""
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [{**messages[0], "tools": _to_json([tool["function"] for tool in tools])}, *messages[1:]]


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the tools into a system message, in the words of Hermes and Qwen, for a template without them."""
    text = (
        "# Tools\n\nYou may call functions. Their signatures, within <tools></tools>:\n<tools>\n"
        + "\n".join(_to_json(tool) for tool in tools)
        + "\n</tools>\n\nFor a call, write a JSON object with its name and arguments within "
        "<tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )
    if messages and messages[0]["role"] == "system":
        return [_extended(messages[0], f"\n\n{text}"), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
