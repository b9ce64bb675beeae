"""How thoughts and tool calls are read out of a chat's answer: the model's style joined with the request's
tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..chat_output.events import OutputParser
from ..chat_output.style import ChatStyle
from ..text.served_model import ServedModel
from .bodies.chat import ChatCompletionRequest

NO_BOUND = 1 << 30


@dataclass(frozen=True, slots=True)
class ChatReading:
    """A value, so that it travels from the reader process."""

    style: ChatStyle
    # that may be called, with the schemas of their parameters where the style needs them
    tools: dict[str, Any]
    marks: dict[int, str]  # tokens that the parsers must see as text
    tokens_only: bool  # a mark that is spelled out is none
    max_calls: int  # further calls are left out
    as_function_call: bool  # the one call is reported in the form that OpenAI had before tools

    @classmethod
    def of(cls, request: ChatCompletionRequest, model: ServedModel) -> ChatReading:
        """Return how to read the answers to a request that offers tools, or of a model that thinks."""
        style = model.chat_style
        functions = [tool.function for tool in request.callable_tools]
        marks = model.tokenizer.ids_apart(style.marks(tools=bool(functions)))
        (ids,) = model.tokenizer.encode([f"a{'a'.join(marks.values())}a"], add_special_tokens=False)
        whole = [mark for token_id, mark in marks.items() if token_id in ids]  # others are pieces within text
        return cls(
            style=style,
            tools={each.name: each.parameters if style.typed else None for each in functions},
            marks=marks,
            tokens_only=style.has_only(whole, tools=bool(functions)),
            max_calls=1 if request.one_call else NO_BOUND,
            as_function_call=request.functions is not None,
        )

    @property
    def short_call_ids(self) -> bool:
        """Whether calls get ids of nine characters, as Mistral's templates require."""
        return self.style.tools == "mistral"

    def parser(self, prompt_text: str) -> OutputParser:
        """Return a new parser of one answer to the prompt that ends like this."""
        return self.style.parser(self.tools, prompt_text)
