"""The prompts of a request as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..chat_output.reasoning import OPEN
from ..errors import ContextTooLong, InvalidRequest
from ..text.served_model import ServedModel
from ..text.tokenizer import PIECE_CHARS
from .bodies.chat import ChatCompletionRequest, Message
from .bodies.completion import CompletionRequest
from .bodies.fields import MAX_TOKENS

TAIL_CHARS = len(OPEN) + 64
INLINE_CHARS = 400
"""Longer prompts are prepared on a thread: the event loop has streams to serve. Measured: 400 characters take
about 0.1 ms, a round trip through the thread about as long."""

BATCH_CHARS = 1 << 18
CHARS_PER_MESSAGE = 16
CHARS_PER_TOOL = 300
IDS_PER_CHAR = 10
"""What a message costs beside its text, a tool in all, and how many token ids cost what a character does."""


class Prompt(NamedTuple):
    """One prompt. ``text`` is the client's own; where it sent token ids, their text if it is to be echoed."""

    token_ids: Sequence[int]
    text: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes in memory once it is packed, with the column that is sent to workers."""
        return 8 * len(self.token_ids) + len(self.text)

    def packed(self) -> Prompt:
        """Keep the ids in 4 bytes each, not 40: they stay until the request has ended."""
        return Prompt(array("I", self.token_ids), self.text)

    def without_text(self) -> Prompt:
        """Keep only the end of the text, which shows whether the chat template has opened a thought."""
        return self if len(self.text) <= TAIL_CHARS else Prompt(self.token_ids, self.text[-TAIL_CHARS:])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the ids as packed numbers: a million integers take long otherwise."""
        return _unpacked, (array("I", self.token_ids).tobytes(), self.text)


def _unpacked(token_ids: bytes, text: str) -> Prompt:
    return Prompt(array("I", token_ids), text)


def is_long(request: CompletionRequest | ChatCompletionRequest) -> bool:
    """Whether ``prompts_of`` is better called on a thread."""
    if isinstance(request, ChatCompletionRequest):
        num_chars = CHARS_PER_MESSAGE * len(request.messages) + CHARS_PER_TOOL * len(request.offered_tools)
        for message in request.messages:
            num_chars += len(message.content or "")
    else:
        num_chars = sum(
            len(prompt) if isinstance(prompt, str) else len(prompt) // IDS_PER_CHAR
            for prompt in request.prompt
        )
    return num_chars > INLINE_CHARS


def num_choices(request: CompletionRequest | ChatCompletionRequest) -> int:
    """Return the number of sequences that it asks for."""
    return request.num_candidates * (len(request.prompt) if isinstance(request, CompletionRequest) else 1)


def prompts_of(request: CompletionRequest | ChatCompletionRequest, model: ServedModel) -> list[Prompt]:
    """Return the prompts: one for a chat, one or several for a completion. Raises InvalidRequest."""
    keep = None if request.truncate_prompt_tokens is None else _num_kept(request, model)
    if isinstance(request, ChatCompletionRequest):
        tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
        prompts = [
            chat_prompt(request.messages, model, extra=request.template_variables, tools=tools, keep=keep)
        ]
        param = "messages"
    else:
        prompts = _completion_prompts(request.prompt, model, with_text=bool(request.echo), keep=keep)
        param = "prompt"
    for prompt in prompts:
        if not prompt.token_ids:
            raise InvalidRequest(f"{param}: must not be empty", param=param)
    if keep is not None:
        with_text = isinstance(request, CompletionRequest) and bool(request.echo)
        return [_last_tokens(prompt, keep, model, with_text=with_text) for prompt in prompts]
    return prompts


def _num_kept(request: CompletionRequest | ChatCompletionRequest, model: ServedModel) -> int:
    """Return the number of a prompt's last tokens to keep: as asked, or by the room beside the new ones."""
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
    most: int | None = None,
    keep: int | None = None,
) -> Prompt:
    """Render messages by the chat template, which writes BOS if the model has one. Raises InvalidRequest."""
    template = model.chat_template
    if template is None:
        raise InvalidRequest(
            f"The model {model.name!r} has no chat template; use /v1/completions.", param="messages"
        )
    plain = [message.for_template() for message in messages]
    text = template.render(plain, add_generation_prompt=add_generation_prompt, extra=extra, tools=tools)
    (token_ids,) = encode([text], model, add_special_tokens=False, most=most, keep=keep, param="messages")
    return Prompt(token_ids, text)


def encode(
    texts: Sequence[str],
    model: ServedModel,
    *,
    add_special_tokens: bool,
    most: int | None = None,
    keep: int | None = None,
    param: str = "prompt",
) -> list[list[int]]:
    """Return the token ids of each text. ``keep``: only its last tokens are needed.

    Raises ContextTooLong if a text has more than ``most`` tokens (default: the model's context), without
    tokenizing it whole.
    """
    tokenizer, most = model.tokenizer, model.max_model_len if most is None else most
    if keep is not None:
        texts = [tokenizer.ending(text, keep) if len(text) > 2 * PIECE_CHARS else text for text in texts]
    else:
        for text in texts:
            if (count := tokenizer.at_least(text, most)) is not None:
                raise ContextTooLong(most, count, None, param=param, at_least=True)
    found: list[list[int]] = []
    room = MAX_TOKENS
    for some in _batches(texts):
        found += tokenizer.encode(some, add_special_tokens=add_special_tokens)
        room -= sum(map(len, found[-len(some) :]))
        if room < 0:
            raise InvalidRequest(
                f"{param}: has more than {MAX_TOKENS} tokens in all; send several requests", param=param
            )
    return found


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield texts to tokenize together: that takes some 200 bytes of memory for each token."""
    begin = num_chars = 0
    for i, text in enumerate(texts):
        num_chars += len(text)
        if num_chars > BATCH_CHARS:
            yield texts[begin : i + 1]
            begin, num_chars = i + 1, 0
    if begin < len(texts):
        yield texts[begin:]


def _completion_prompts(
    prompts: list[str] | list[list[int]], model: ServedModel, *, with_text: bool, keep: int | None
) -> list[Prompt]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        encoded = encode(texts, model, add_special_tokens=True, keep=keep)
        return [Prompt(token_ids, text) for token_ids, text in zip(encoded, texts, strict=True)]
    ids = [prompt for prompt in prompts if isinstance(prompt, list)]
    for token_ids in ids:
        if max(token_ids) >= model.vocab_size:
            message = (
                f"prompt: token id {max(token_ids)} is outside the vocabulary of {model.vocab_size} tokens"
            )
            raise InvalidRequest(message, param="prompt")
    return [Prompt(token_ids, _text_of(token_ids, model) if with_text else "") for token_ids in ids]


def _text_of(token_ids: Sequence[int], model: ServedModel) -> str:
    detokenizer = model.tokenizer.detokenizer(())
    return "".join([*map(detokenizer.step, token_ids), detokenizer.finish()])
