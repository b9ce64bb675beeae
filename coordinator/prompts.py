"""The prompts of a request as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .bodies.chat import ChatCompletionRequest, Message
from .bodies.completion import CompletionRequest
from .errors import InvalidRequest
from .served_model import ServedModel

INLINE_CHARS = 400
"""Longer prompts are prepared on a thread: the event loop has streams to serve. Measured: 400 characters take about 0.1 ms, a round
trip through the thread about as long."""

CHARS_PER_MESSAGE = 16
CHARS_PER_TOOL = 300
IDS_PER_CHAR = 10
"""What a message costs beside its text, a tool in all, and how many token ids cost what a character does."""


class Prompt(NamedTuple):
    """One prompt. ``text`` is the client's own; where it sent token ids, their text if it is to be echoed."""

    token_ids: list[int]
    text: str = ""


def is_long(request: CompletionRequest | ChatCompletionRequest) -> bool:
    """Whether ``prompts_of`` is better called on a thread."""
    if isinstance(request, ChatCompletionRequest):
        num_chars = CHARS_PER_MESSAGE * len(request.messages) + CHARS_PER_TOOL * len(request.offered_tools)
        for message in request.messages:
            num_chars += len(message.content or "")
    else:
        num_chars = sum(len(prompt) if isinstance(prompt, str) else len(prompt) // IDS_PER_CHAR for prompt in request.prompt)
    return num_chars > INLINE_CHARS


def prompts_of(request: CompletionRequest | ChatCompletionRequest, model: ServedModel) -> list[Prompt]:
    """One for a chat, one or several for a completion. Raises InvalidRequest."""
    if isinstance(request, ChatCompletionRequest):
        tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
        prompts = [chat_prompt(request.messages, model, extra=request.template_variables, tools=tools)]
        param = "messages"
    else:
        prompts = _completion_prompts(request.prompt, model, with_text=bool(request.echo))
        param = "prompt"
    for prompt in prompts:
        if not prompt.token_ids:
            raise InvalidRequest(f"{param}: must not be empty", param=param)
    if request.truncate_prompt_tokens is not None:
        keep, with_text = _num_kept(request, model), isinstance(request, CompletionRequest) and bool(request.echo)
        return [_last_tokens(prompt, keep, model, with_text=with_text) for prompt in prompts]
    return prompts


def _num_kept(request: CompletionRequest | ChatCompletionRequest, model: ServedModel) -> int:
    """Of a prompt's tokens: as many as asked for, or as there is room for beside the new ones."""
    if (asked := request.truncate_prompt_tokens) is not None and asked > 0:
        return asked
    return max(1, model.max_model_len - (request.max_new_tokens or 1))


def _last_tokens(prompt: Prompt, keep: int, model: ServedModel, *, with_text: bool) -> Prompt:
    if len(prompt.token_ids) <= keep:
        return prompt
    token_ids = prompt.token_ids[-keep:]
    return Prompt(token_ids, _text_of(token_ids, model) if with_text else prompt.text)


def chat_prompt(
    messages: Sequence[Message],
    model: ServedModel,
    *,
    add_generation_prompt: bool = True,
    extra: dict[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> Prompt:
    """Messages through the chat template, which writes BOS itself where the model wants one. Raises InvalidRequest."""
    template = model.chat_template
    if template is None:
        raise InvalidRequest(f"The model {model.name!r} has no chat template; use /v1/completions.", param="messages")
    text = template.render(messages, add_generation_prompt=add_generation_prompt, extra=extra, tools=tools)
    (token_ids,) = model.tokenizer.encode([text], add_special_tokens=False)
    return Prompt(token_ids, text)


def _completion_prompts(prompts: list[str] | list[list[int]], model: ServedModel, *, with_text: bool) -> list[Prompt]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        encoded = model.tokenizer.encode(texts, add_special_tokens=True)
        return [Prompt(token_ids, text) for token_ids, text in zip(encoded, texts, strict=True)]
    ids = [prompt for prompt in prompts if isinstance(prompt, list)]
    for token_ids in ids:
        if max(token_ids) >= model.vocab_size:
            message = f"prompt: token id {max(token_ids)} is outside the vocabulary of {model.vocab_size} tokens"
            raise InvalidRequest(message, param="prompt")
    return [Prompt(token_ids, _text_of(token_ids, model) if with_text else "") for token_ids in ids]


def _text_of(token_ids: list[int], model: ServedModel) -> str:
    detokenizer = model.tokenizer.detokenizer(())
    return "".join([*map(detokenizer.step, token_ids), detokenizer.finish()])
