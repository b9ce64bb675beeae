"""How the answers to one chat request are read, and what holds them to a form: the model's style joined with what was asked for."""

from __future__ import annotations

from collections.abc import Callable

from ..chat_output.events import OutputParser
from ..chat_output.reasoning import ReasoningParser, thinks_already
from ..chat_output.style import THOUGHT_MARKS
from ..chat_output.tool_parsers import ARGS, tool_parser
from ..text.detokenizer import Detokenizer
from ..text.served_model import ServedModel
from .bodies.chat import ChatCompletionRequest
from .bodies.output_format import grammar_of
from .call_grammar import after_thought, call_grammar, calls_at_will, either
from .choice import ChoiceOptions
from .parsed_choice import MarkedDetokenizer
from .prompts import Prompt
from .sampling_params import GenerateRequest


def has_grammar(request: GenerateRequest) -> bool:
    """Whether workers need a mask for it."""
    return request.output_format is not None or (isinstance(request, ChatCompletionRequest) and request.holds_calls)


def grammar_for(request: GenerateRequest, model: ServedModel, prompt: Prompt) -> tuple[bytes, str]:
    """What the output must follow (empty: nothing), and the field to blame should it be no grammar."""
    wanted = request.output_format
    grammar, param = (grammar_of(wanted), wanted.param) if wanted is not None else (b"", "")
    if not isinstance(request, ChatCompletionRequest):
        return grammar, param
    if request.must_call:
        grammar, param = _calls(request, model), request.field_of_tools
    elif grammar and request.callable_tools:
        grammar = either(grammar, _calls(request, model))
    elif request.holds_calls:
        grammar, param = _calls(request, model, make=calls_at_will), request.field_of_tools
    if grammar and model.chat_style.thinks:
        special = model.tokenizer.special_id(THOUGHT_MARKS[1]) is not None
        grammar = after_thought(grammar, model.tokenizer.as_lark, special, opened=thinks_already(prompt.text))
    return grammar, param


def read_as_chat(options: ChoiceOptions, request: GenerateRequest, model: ServedModel) -> ChoiceOptions:
    """The options of a chat whose answers may hold thoughts or tool calls; others as they are."""
    style = model.chat_style
    if not isinstance(request, ChatCompletionRequest) or not (style.thinks or request.offered_tools):
        return options
    names = [tool.function.name for tool in request.callable_tools]

    def parser_of(prompt: Prompt) -> OutputParser:
        calls = tool_parser(style.tools, names) if names else None
        if not style.thinks:
            assert calls is not None
            return calls
        return ReasoningParser(calls, opened=thinks_already(prompt.text))

    return options._replace(
        parser_of=parser_of,
        detokenizer_of=_marked(options.detokenizer_of, model.tokenizer.special_ids(style.marks(tools=bool(names)))),
        thinks=style.thinks,
        max_calls=1 if request.one_call else options.max_calls,
        short_call_ids=style.tools == "mistral",
        as_function_call=request.functions is not None,
    )


def _calls(request: ChatCompletionRequest, model: ServedModel, make: Callable[..., bytes] = call_grammar) -> bytes:
    tokenizer = model.tokenizer
    return make(
        model.chat_style.tools,
        request.callable_tools,
        tokenizer.as_lark,
        parallel=not request.one_call,
        has_args_mark=tokenizer.fast.token_to_id(ARGS) is not None,
    )


def _marked(detokenizer_of: Callable[..., Detokenizer], marks: dict[int, str]) -> Callable[..., Detokenizer]:
    if not marks:
        return detokenizer_of
    return lambda prompt_ids: MarkedDetokenizer(detokenizer_of(prompt_ids), marks)
