"""From the body of /v1/embeddings to the completion that is planned for it: its prompts, and no new token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..errors import ContextTooLong, InvalidRequest, WrongField
from ..text.served_model import ServedModel
from .bodies.completion import CompletionRequest
from .bodies.embedding import EmbeddingRequest, Encoding
from .bodies.rerank import ScoringFields
from .prompts import encode

SAME = (
    "model", "user", "request_id", "metadata", "service_tier", "priority", "cache_salt", "timeout",
)  # fmt: skip
"""Fields that are a completion's, too."""
VALUE_BYTES = 16
"""A number takes this in an answer, as JSON."""


class EmbeddingForm(NamedTuple):
    """How the vectors are answered."""

    encoding: Encoding
    dimensions: int | None  # that are kept; None: all
    num_bytes: int  # of one vector in the answer, at most
    endpoint: Literal["/v1/embeddings"] = "/v1/embeddings"
    logits_of: tuple[int, ...] = ()


def embedding_form(request: EmbeddingRequest, model: ServedModel) -> tuple[EmbeddingForm, CompletionRequest]:
    """Return the form, and the completion of the prompts as token ids, checked against the model. Raises
    InvalidRequest where the model has no such embeddings."""
    rules = model.embeddings
    if rules.refusal:
        raise InvalidRequest(f"The model {model.name!r} has no embeddings here: {rules.refusal}.")
    if request.dimensions is not None and 0 < rules.size < request.dimensions:
        raise WrongField("dimensions", f"is {request.dimensions}; the model's vectors have {rules.size}")
    size = request.dimensions or rules.size
    form = EmbeddingForm(request.encoding_format or "float", request.dimensions, VALUE_BYTES * size)
    return form, completion_of(request, _token_ids(request, model))


def completion_of(request: EmbeddingRequest | ScoringFields, prompts: list[list[int]]) -> CompletionRequest:
    """Return the completion of these prompts, with the fields of both and no new token."""
    fields = {name: getattr(request, name) for name in SAME if name in request.model_fields_set}
    return CompletionRequest.model_construct(prompt=prompts, max_tokens=0, on_timeout="error", **fields)


def _token_ids(request: EmbeddingRequest, model: ServedModel) -> list[list[int]]:
    most = model.max_model_len - 1  # a worker's sequence has room for one token more
    most = min(most, model.embeddings.longest or most)
    asked = request.truncate_prompt_tokens
    keep = None if asked is None else most if asked < 0 else min(asked, most)
    texts = [each for each in request.input if isinstance(each, str)]
    prompts: list[list[int]] = request.input
    if texts:
        special = request.add_special_tokens is not False
        bound = None if keep is None else -keep
        prompts = encode(texts, model, add_special_tokens=special, most=most, keep=bound, param="input")
        if special:
            prompts = [model.embeddings.ended(token_ids) for token_ids in prompts]
    if keep is not None:
        prompts = [_kept(token_ids, keep, model.tokenizer.table.special) for token_ids in prompts]
    for token_ids in prompts:
        if not token_ids:
            raise WrongField("input", "must not be empty")
        if (largest := max(token_ids)) >= model.vocab_size:
            raise WrongField(
                "input", f"token id {largest} is outside the vocabulary of {model.vocab_size} tokens"
            )
        if len(token_ids) > most:
            raise ContextTooLong(most, len(token_ids), None, param="input")
    return prompts


def _kept(token_ids: Sequence[int], keep: int, special: frozenset[int]) -> list[int]:
    """Cut a text's end off, before the special token that ends it: its hidden state is the embedding."""
    if len(token_ids) <= keep:
        return list(token_ids)
    ends = token_ids[-1] in special and keep > 1
    return [*token_ids[: keep - 1], token_ids[-1]] if ends else list(token_ids[:keep])
