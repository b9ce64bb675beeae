"""From a body to what workers need of it: parsed, validated, rendered, tokenized, its grammar compiled.

The same code runs in two places: on the event loop and its threads for small bodies, in a process of its own for large ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from ...chat_output.reasoning import OPEN
from ...http.call import Endpoint
from ...text.served_model import ServedModel
from ...validation import from_validation
from ..bodies.chat import ChatCompletionRequest
from ..bodies.completion import CompletionRequest
from ..bodies.fields import Body
from ..bodies.tools import Function
from ..chat_reading import grammar_for
from ..grammar_check import GrammarCheck
from ..prompts import Prompt, prompts_of
from ..sampling_params import GenerateRequest

FORMATS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
B = TypeVar("B", bound=Body)
TAIL_CHARS = len(OPEN) + 64
"""Of a chat's prompt: it ends in the mark of a thought, or does not."""


class Inputs(NamedTuple):
    """What takes time to make of a request."""

    prompts: list[Prompt]
    grammar: bytes = b""


def parse(endpoint: Endpoint, body: bytes | bytearray) -> GenerateRequest:
    """Raises InvalidRequest."""
    kind = ChatCompletionRequest if endpoint == "/v1/chat/completions" else CompletionRequest
    try:
        request: GenerateRequest = kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error
    return request


class PromptReader:
    """For one model. ``prepare`` may be called on several threads."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._grammars = GrammarCheck(model.tokenizer, model.vocab_size)

    def prepare(self, request: GenerateRequest) -> Inputs:
        """Raises InvalidRequest."""
        prompts = prompts_of(request, self.model)
        grammar, param = grammar_for(request, self.model, prompts[0])
        if grammar:
            self._grammars.check(grammar, param)
        return Inputs(prompts, grammar)


def without_inputs(request: GenerateRequest) -> GenerateRequest:
    """The request without what ``prepare`` has used up: prompts, messages, schemas. What is left is small."""
    emptied: dict[str, Any] = {name: None for name in FORMATS if getattr(request, name) is not None}
    if isinstance(request, CompletionRequest):
        emptied["prompt"] = []
    else:
        emptied |= {"messages": [], "chat_template_kwargs": None}
        if request.tools is not None:
            emptied["tools"] = [_slim(tool, function=_named_alone(tool.function)) for tool in request.tools]
        if request.functions is not None:
            emptied["functions"] = [_named_alone(function) for function in request.functions]
    return _slim(request, **emptied)


def _named_alone(function: Function) -> Function:
    return _slim(function, parameters=None, description=None)


def _slim(body: B, **changed: Any) -> B:
    slim = body.model_copy(update=changed)
    slim.__pydantic_extra__ = {}
    return slim
