"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from .fields import INT64, invalid, only, scalars
from .messages import MAX_MESSAGES, Message, TemplateFields
from .sampling import SamplingFields
from .tools import (
    FUNCTION_CALL,
    MAX_TOOLS,
    TOOL_CHOICE,
    Function,
    Tool,
    ToolChoice,
    check_function_call,
    check_tool_choice,
)


class ChatCompletionRequest(SamplingFields, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    """The answer begins with the content of the last message, if that is the assistant's."""
    tool_choice: Annotated[Any, BeforeValidator(check_tool_choice), TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    function_call: Annotated[Any, BeforeValidator(check_function_call), FUNCTION_CALL] = None
    """OpenAI's fields before ``tools``; their answers report the one call in the old form, too."""
    modalities: Annotated[
        Any, AfterValidator(only(None, ["text"])), WithJsonSchema({"enum": [None, ["text"]]})
    ] = None

    LOGPROBS: ClassVar[tuple[str, str]] = "top_logprobs", "`logprobs` true"
    _own_scalars = scalars("max_completion_tokens", "logprobs", "top_logprobs", "parallel_tool_calls", "echo")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs: only allowed with `logprobs` true")
        if self.functions is not None or self.function_call is not None:
            self._check_functions()
        return self if self.choice_of_tools is None and not self.all_tools else self._calls_are_possible()

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _check_functions(self) -> None:
        if self.tools is not None or self.tool_choice is not None:
            raise invalid(
                "functions: not allowed beside `tools` and `tool_choice`, which came after "
                "`functions` and `function_call`"
            )
        if self.functions is None:
            raise invalid("function_call: needs `functions` to choose from")

    def _calls_are_possible(self) -> Self:
        choice, tools = self.choice_of_tools, self.all_tools
        if choice is not None and (choice.names is not None or choice.mode == "required"):
            field = "function_call" if self.functions else "tool_choice"
            if not tools:
                raise invalid("tool_choice: needs `tools` to choose from")
            if unknown := sorted((choice.names or frozenset()) - {tool.function.name for tool in tools}):
                raise invalid(
                    f"{field}: there is no function {', '.join(map(repr, unknown))} in "
                    f"`{self.field_of_tools}`"
                )
        if self.holds_calls and (self.ignore_eos or self.min_tokens):
            why = "a tool call must be made" if self.must_call else "tool calls are held to a form"
            raise invalid(f"{'ignore_eos' if self.ignore_eos else 'min_tokens'}: not allowed where {why}")
        return self

    @property
    def field_of_tools(self) -> str:
        """The name of the body's field of tools."""
        return "tools" if self.functions is None else "functions"

    @property
    def all_tools(self) -> list[Tool] | None:
        """All tools, from ``tools`` or ``functions``."""
        if self.functions is None:
            return self.tools
        return [Tool(type="function", function=function) for function in self.functions]

    @property
    def choice_of_tools(self) -> ToolChoice | None:
        """The choice, from ``tool_choice`` or ``function_call``."""
        choice: ToolChoice | None = self.tool_choice if self.functions is None else self.function_call
        return choice

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the template shows to the model."""
        choice = self.choice_of_tools
        return [] if choice is not None and choice.mode == "none" else self.all_tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """The offered tools that may be called."""
        choice = self.choice_of_tools
        names = choice.names if choice is not None else None
        return [tool for tool in self.offered_tools if names is None or tool.function.name in names]

    @property
    def has_grammar(self) -> bool:
        return self.output_format is not None or self.holds_calls

    @property
    def must_call(self) -> bool:
        """Whether a call is required."""
        return (choice := self.choice_of_tools) is not None and choice.mode == "required"

    @property
    def one_call(self) -> bool:
        """Whether an answer has at most one call."""
        choice = self.choice_of_tools
        older = self.functions is not None
        return older or self.parallel_tool_calls is False or (choice is not None and choice.one)

    @property
    def holds_calls(self) -> bool:
        """Whether a grammar binds the calls: one is required, some tools are excluded, or one is strict."""
        if not self.offered_tools:
            return False
        limited = (choice := self.choice_of_tools) is not None and choice.names is not None
        return self.must_call or limited or any(tool.function.strict for tool in self.callable_tools)
