"""How thoughts and tool calls are read out of a chat's answer: the model's style joined with the request's
tools."""

from __future__ import annotations

from dataclasses import dataclass

from ..chat_output.events import OutputParser
from ..chat_output.reasoning import ReasoningParser, thinks_already
from ..chat_output.tool_parsers import ToolStyle, tool_parser
from ..text.served_model import ServedModel
from .bodies.chat import ChatCompletionRequest

NO_BOUND = 1 << 30


@dataclass(frozen=True, slots=True)
class ChatReading:
    """A value, so that it travels from the reader process."""

    style: ToolStyle
    tools: tuple[str, ...]  # that may be called
    thinks: bool  # an answer may begin with a thought
    marks: dict[int, str]  # special tokens that the parsers must see as text
    max_calls: int  # further calls are left out
    as_function_call: bool  # the one call is reported in the form that OpenAI had before tools

    @classmethod
    def of(cls, request: ChatCompletionRequest, model: ServedModel) -> ChatReading:
        """Return how to read the answers to a request that offers tools, or of a model that thinks."""
        style = model.chat_style
        names = tuple([tool.function.name for tool in request.callable_tools])
        return cls(
            style=style.tools,
            tools=names,
            thinks=style.thinks,
            marks=model.tokenizer.special_ids(style.marks(tools=bool(names))),
            max_calls=1 if request.one_call else NO_BOUND,
            as_function_call=request.functions is not None,
        )

    @property
    def short_call_ids(self) -> bool:
        """Whether calls get ids of nine characters, as Mistral's templates require."""
        return self.style == "mistral"

    def parser(self, prompt_text: str) -> OutputParser:
        """Return a new parser of one answer to the prompt that ends like this."""
        calls = tool_parser(self.style, self.tools) if self.tools else None
        if self.thinks:
            return ReasoningParser(calls, opened=thinks_already(prompt_text))
        assert calls is not None, "a chat that neither thinks nor offers tools is not parsed"
        return calls
