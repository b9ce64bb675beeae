"""The prompts of a request as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...transport.messages.images import FIRST_IMAGE_ID, Image
from ..errors import ContextTooLong, WrongField
from ..images.rules import NoImages
from ..text.served_model import ServedModel
from ..text.tokenizer import PIECE_CHARS, Tokenizer
from .bodies.chat import ChatCompletionRequest
from .bodies.completion import CompletionRequest
from .bodies.fields import MAX_TOKENS
from .bodies.messages import Message, TemplateFields
from .bodies.tools import Tool
from .image_prompts import check_here, check_marks, images_of, rules_for, with_images

GenerateRequest = CompletionRequest | ChatCompletionRequest
TAIL_CHARS = 96
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
    images: tuple[Image, ...] = ()
    image_id: int = 0
    """Shown to clients for each token of an image that has a feature."""

    @property
    def num_bytes(self) -> int:
        """Bytes in memory once it is packed, with the column that is sent to workers."""
        return 8 * len(self.token_ids) + len(self.text) + sum([len(image.pixels) for image in self.images])

    @property
    def shown_ids(self) -> Sequence[int]:
        """The ids as clients see them: all are the tokenizer's."""
        if not self.images:
            return self.token_ids
        return [self.image_id if one >= FIRST_IMAGE_ID else one for one in self.token_ids]

    def packed(self) -> Prompt:
        """Keep the ids in 4 bytes each, not 40: they stay until the request has ended."""
        return self._replace(token_ids=array("I", self.token_ids))

    def without_text(self) -> Prompt:
        """Keep only the end of the text, which shows whether the chat template has opened a thought."""
        return self if len(self.text) <= TAIL_CHARS else self._replace(text=self.text[-TAIL_CHARS:])

    def lengths(self, tokenizer: Tokenizer) -> list[int]:
        """Return the number of characters of each token in ``text``, in which special tokens that the
        tokenizer has put before it are missing."""
        detokenizer = tokenizer.detokenizer((), special=True)
        lengths = [len(detokenizer.step(token_id)) for token_id in self.token_ids]
        surplus = sum(lengths) - len(self.text)
        for i, token_id in enumerate(self.token_ids):
            if surplus <= 0 or token_id not in tokenizer.table.special:
                break
            surplus, lengths[i] = surplus - lengths[i], 0
        return lengths

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the ids as packed numbers: a million integers take long otherwise."""
        return _unpacked, (array("I", self.token_ids).tobytes(), *self[1:])


def _unpacked(token_ids: bytes, *others: Any) -> Prompt:
    return Prompt(array("I", token_ids), *others)


def has_images(request: object) -> bool:
    return isinstance(request, ChatCompletionRequest) and any(message.images for message in request.messages)


def is_long(request: GenerateRequest) -> bool:
    """Whether ``prompts_of`` is better called on a thread."""
    if has_images(request):
        return True
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


def num_choices(request: GenerateRequest) -> int:
    """Return the number of sequences that it asks for."""
    return request.num_candidates * (len(request.prompt) if isinstance(request, CompletionRequest) else 1)


def prompts_of(request: GenerateRequest, model: ServedModel) -> list[Prompt]:
    """Return the prompts: one for a chat, one or several for a completion. Raises InvalidRequest."""
    keep = None if request.truncate_prompt_tokens is None else _num_kept(request, model)
    if isinstance(request, ChatCompletionRequest):
        _check_alone(request)
        tools, param = request.offered_tools, "messages"
        prompts = [chat_prompt(request, request.messages, tools, model, keep=keep)]
    else:
        prompts, param = _completion_prompts(request, model, keep=keep), "prompt"
    for prompt in prompts:
        if not prompt.token_ids:
            raise WrongField(param, "must not be empty")
    if keep is not None:
        with_text = isinstance(request, CompletionRequest) and bool(request.echo)
        return [_kept(prompt, keep, model, with_text=with_text) for prompt in prompts]
    return prompts


def _check_alone(chat: ChatCompletionRequest) -> None:
    """Raises InvalidRequest for what is not built for chats with images."""
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(chat, name) is not None and any(message.images for message in chat.messages):
            raise WrongField(name, "is not built for chats with images")


def _num_kept(request: GenerateRequest, model: ServedModel) -> int:
    """Return the number of a prompt's tokens to keep, as asked or by the room beside the new ones: its last
    ones or, as a negative number, its first ones."""
    asked = request.truncate_prompt_tokens or -1
    keep = asked if asked > 0 else max(1, model.max_model_len - (request.max_new_tokens or 1))
    return -keep if request.truncation_side == "right" else keep


def _kept(prompt: Prompt, keep: int, model: ServedModel, *, with_text: bool) -> Prompt:
    if len(prompt.token_ids) <= abs(keep):
        return prompt
    token_ids = prompt.token_ids[-keep:] if keep > 0 else prompt.token_ids[:-keep]
    return Prompt(token_ids, _text_of(token_ids, model) if with_text else prompt.text)


def chat_prompt(
    request: TemplateFields,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    model: ServedModel,
    *,
    most: int | None = None,
    keep: int | None = None,
) -> Prompt:
    """Render messages by the chat template, which writes BOS if the model has one. Raises InvalidRequest."""
    images = images_of(messages)
    rules = rules_for(images, model) if images else model.images
    template = model.template_for(request.chat_template)
    if (goes_on := bool(request.continue_final_message)) and messages[-1].role != "assistant":
        raise WrongField("continue_final_message", "the last message must be the assistant's")
    text = template.render(
        [message.for_template() for message in messages],
        add_generation_prompt=request.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
        extra=request.template_variables,
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
    )
    special = bool(request.add_special_tokens)
    (token_ids,) = encode([text], model, add_special_tokens=special, most=most, keep=keep, param="messages")
    if isinstance(rules, NoImages):
        return Prompt(token_ids, text)
    check_marks(token_ids, len(images), rules)
    if not images:
        return Prompt(token_ids, text)
    check_here(images)
    placed = with_images(token_ids, images, rules, model.max_model_len if most is None else most)
    return Prompt(placed.token_ids, text, placed.images, rules.token_id)


def encode(
    texts: Iterable[str],
    model: ServedModel,
    *,
    add_special_tokens: bool,
    most: int | None = None,
    keep: int | None = None,
    param: str = "prompt",
) -> list[list[int]]:
    """Return the token ids of each text; texts are asked for when they are tokenized. ``keep``: only its last
    tokens are needed, or with a negative number its first ones.

    Raises ContextTooLong if a text has more than ``most`` tokens (default: the model's context), without
    tokenizing it whole.
    """
    tokenizer, most = model.tokenizer, model.max_model_len if most is None else most

    def checked(text: str) -> str:
        if keep is not None:
            return tokenizer.part(text, keep) if len(text) > 2 * PIECE_CHARS else text
        if (count := tokenizer.at_least(text, most)) is not None:
            raise ContextTooLong(most, count, None, param=param, at_least=True)
        return text

    found: list[list[int]] = []
    room = MAX_TOKENS
    for some in _batches(map(checked, texts)):
        found += tokenizer.encode(some, add_special_tokens=add_special_tokens)
        room -= sum(map(len, found[-len(some) :]))
        if room < 0:
            raise WrongField(param, f"has more than {MAX_TOKENS} tokens in all; send several requests")
    return found


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts to tokenize together: that takes some 200 bytes of memory for each token."""
    some, num_chars = list[str](), 0
    for text in texts:
        some.append(text)
        num_chars += len(text)
        if num_chars > BATCH_CHARS:
            yield some
            some, num_chars = [], 0
    if some:
        yield some


def _completion_prompts(request: CompletionRequest, model: ServedModel, *, keep: int | None) -> list[Prompt]:
    prompts: list[str] | list[list[int]] = request.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        special = request.add_special_tokens is not False
        encoded = encode(texts, model, add_special_tokens=special, keep=keep)
        return [Prompt(token_ids, text) for token_ids, text in zip(encoded, texts, strict=True)]
    ids = [prompt for prompt in prompts if isinstance(prompt, list)]
    for token_ids in ids:
        if max(token_ids) >= model.vocab_size:
            raise WrongField(
                "prompt", f"token id {max(token_ids)} is outside the vocabulary of {model.vocab_size} tokens"
            )
    return [Prompt(token_ids, _text_of(token_ids, model) if request.echo else "") for token_ids in ids]


def _text_of(token_ids: Sequence[int], model: ServedModel) -> str:
    detokenizer = model.tokenizer.detokenizer((), special=True)
    return "".join([*map(detokenizer.step, token_ids), detokenizer.finish()])
