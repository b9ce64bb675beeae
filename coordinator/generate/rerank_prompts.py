"""From the body of /v1/rerank or /v1/score to the completion that is planned for it: a prompt for each
document, and no new token."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..errors import ContextTooLong, InvalidRequest
from ..text.reranking import ROLES
from ..text.served_model import ServedModel
from .bodies.completion import CompletionRequest
from .bodies.embedding import EmbeddingRequest
from .bodies.rerank import RerankRequest, ScoreRequest, ScoringFields
from .embedding_prompts import VALUE_BYTES, EmbeddingForm, completion_of, embedding_form
from .prompts import encode

DOCUMENTS = "documents"


class RerankForm(NamedTuple):
    """How scores are answered."""

    endpoint: Literal["/v1/rerank", "/v1/score"]
    logits_of: tuple[int, ...]
    top_n: int | None  # most results that are answered
    documents: list[str]  # that results have; empty: they have none
    num_bytes: int  # of one result in the answer, on average


PromptForm = EmbeddingForm | RerankForm
PromptRequest = EmbeddingRequest | ScoringFields
PROMPT_BODIES: dict[str, type[PromptRequest]] = {
    "/v1/embeddings": EmbeddingRequest, "/v1/rerank": RerankRequest, "/v1/score": ScoreRequest,
}  # fmt: skip
"""The bodies of endpoints whose answers have no tokens."""


def prompt_form(request: PromptRequest, model: ServedModel) -> tuple[PromptForm, CompletionRequest]:
    """Return how prompts without tokens are answered, and their completion. Raises InvalidRequest."""
    if isinstance(request, ScoringFields):
        return rerank_form(request, model)
    return embedding_form(request, model)


def rerank_form(request: ScoringFields, model: ServedModel) -> tuple[RerankForm, CompletionRequest]:
    """Return the form, and the completion of the prompts as token ids, checked against the model. Raises
    InvalidRequest where the model reranks nothing."""
    rules = model.rerank
    if rules.refusal:
        raise InvalidRequest(f"The model {model.name!r} reranks nothing here: {rules.refusal}.")
    template, tokenizer = model.template_for(None), model.tokenizer
    keep = request.max_tokens_per_doc if isinstance(request, RerankRequest) else None

    def rendered(query: str, document: str) -> str:
        pair = query, document if keep is None else tokenizer.beginning(document, keep)
        return template.render([{"role": r, "content": text} for r, text in zip(ROLES, pair, strict=True)])

    texts = (rendered(*pair) for pair in request.pairs)
    most = model.max_model_len - 1  # a worker's sequence has room for one token more
    prompts = encode(texts, model, add_special_tokens=False, most=most, param=DOCUMENTS)
    if (longest := max(map(len, prompts))) > most:
        raise ContextTooLong(most, longest, None, param=DOCUMENTS)
    completion = completion_of(request, prompts)
    if not isinstance(request, RerankRequest):
        return RerankForm("/v1/score", rules.token_ids, None, [], VALUE_BYTES), completion
    shown = [] if request.return_documents is False else request.documents
    num_bytes = VALUE_BYTES + sum(map(len, shown)) // len(request.documents)
    return RerankForm("/v1/rerank", rules.token_ids, request.top_n or None, shown, num_bytes), completion
