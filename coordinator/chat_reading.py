"""How the answers to one chat request are read, and what holds them to a form: the model's style joined with what was asked for."""

from __future__ import annotations

from collections.abc import Callable

from .bodies.chat import ChatCompletionRequest
from .chat_output.call_grammar import after_thought, call_grammar, either
from .chat_output.events import OutputParser
from .chat_output.reasoning import ReasoningParser, thinks_already
from .chat_output.style import THOUGHT_MARKS
from .chat_output.tool_parsers import ARGS, tool_parser
from .choice import ChoiceOptions
from .detokenizer import Detokenizer
from .output_format import grammar_of
from .parsed_choice import MarkedDetokenizer
from .prompts import Prompt
from .sampling_params import GenerateRequest
from .served_model import ServedModel


def has_grammar(request: GenerateRequest) -> bool:
    """Whether workers need a mask for it."""
    return request.output_format is not None or (isinstance(request, ChatCompletionRequest) and bool(request.forced_tools))


def grammar_for(request: GenerateRequest, model: ServedModel, prompt: Prompt) -> tuple[bytes, str]:
    """What the output must follow (empty: nothing), and the field to blame should it be no grammar."""
    wanted = request.output_format
    grammar, param = (grammar_of(wanted), wanted.param) if wanted is not None else (b"", "")
    if not isinstance(request, ChatCompletionRequest):
        return grammar, param
    if request.forced_tools or (request.offered_tools and grammar):
        calls = _calls(request, model)
        grammar, param = (calls, "tools") if request.forced_tools else (either(grammar, calls), param)
    if grammar and model.chat_style.thinks:
        special = model.tokenizer.special_id(THOUGHT_MARKS[1]) is not None
        grammar = after_thought(grammar, model.tokenizer.as_lark, special, opened=thinks_already(prompt.text))
    return grammar, param


def read_as_chat(options: ChoiceOptions, request: GenerateRequest, model: ServedModel) -> ChoiceOptions:
    """The options of a chat whose answers may hold thoughts or tool calls; others as they are."""
    style = model.chat_style
    if not isinstance(request, ChatCompletionRequest) or not (style.thinks or request.offered_tools):
        return options
    names = [tool.function.name for tool in request.offered_tools]

    def parser_of(prompt: Prompt) -> OutputParser:
        calls = tool_parser(style.tools, names) if names else None
        if not style.thinks:
            assert calls is not None
            return calls
        return ReasoningParser(calls, opened=thinks_already(prompt.text))

    return options._replace(
        parser_of=parser_of,
        detokenizer_of=_marked(options.detokenizer_of, model.tokenizer.special_ids(style.marks(tools=bool(names)))),
        max_calls=1 if request.parallel_tool_calls is False else options.max_calls,
        short_call_ids=style.tools == "mistral",
    )


def _calls(request: ChatCompletionRequest, model: ServedModel) -> bytes:
    tokenizer = model.tokenizer
    return call_grammar(
        model.chat_style.tools,
        request.forced_tools or request.offered_tools,
        tokenizer.as_lark,
        parallel=request.parallel_tool_calls is not False and request.tool_choice in (None, "auto", "required"),
        has_args_mark=tokenizer.fast.token_to_id(ARGS) is not None,
    )


def _marked(detokenizer_of: Callable[..., Detokenizer], marks: dict[int, str]) -> Callable[..., Detokenizer]:
    if not marks:
        return detokenizer_of
    return lambda prompt_ids: MarkedDetokenizer(detokenizer_of(prompt_ids), marks)
