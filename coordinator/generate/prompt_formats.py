"""The JSON of answers that have no tokens: embeddings, and scores of documents."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import orjson

from ..text.served_model import ServedModel
from .embedding_prompts import EmbeddingForm
from .formats import ChatFormat, ChoiceResult, CompletionFormat, Usage
from .plan import RequestPlan
from .rerank_prompts import RerankForm

COUNTS = ("prompt_tokens", "total_tokens", "prompt_tokens_details", "splitserve")


class EmbeddingFormat(CompletionFormat):
    """/v1/embeddings."""

    def of_vector(self, numbers: bytes) -> orjson.Fragment | float:
        """See ``CompletionFormat``."""
        form = self._plan.prompt_form
        assert isinstance(form, EmbeddingForm), "the endpoint's"
        vector: Any = self._model.embeddings.vector(numbers, form.dimensions)
        if form.encoding == "base64":
            vector = b64encode(vector.tobytes()).decode()
        return orjson.Fragment(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """See ``CompletionFormat``."""
        data = [{"object": "embedding", "index": c.index, "embedding": c.of_vector} for c in choices]
        return self._answer({"object": "list", "data": data, "model": self._model_name}, usage)

    def _answer(self, answer: dict[str, Any], usage: Usage) -> bytes:
        answer["usage"] = {name: usage[name] for name in COUNTS}
        if self._plan.service_tier is not None:
            answer["service_tier"] = self._plan.service_tier
        return orjson.dumps(answer)


class ScoreFormat(EmbeddingFormat):
    """/v1/score."""

    def of_vector(self, numbers: bytes) -> float:
        """See ``CompletionFormat``."""
        return self._model.rerank.score(numbers)

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """See ``CompletionFormat``."""
        data = [{"index": c.index, "object": "score", "score": c.of_vector} for c in choices]
        return self._answer({**self._head("list"), "data": data}, usage)


class RerankFormat(ScoreFormat):
    """/v1/rerank."""

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """See ``CompletionFormat``."""
        form = self._plan.prompt_form
        assert isinstance(form, RerankForm), "the endpoint's"
        scores = [(-c.of_vector, c.index) for c in choices if isinstance(c.of_vector, float)]
        texts = [{"document": {"text": text}} for text in form.documents] or [{}] * len(choices)
        best = sorted(scores)[: form.top_n]
        results = [{"index": i, **texts[i], "relevance_score": -score} for score, i in best]
        return self._answer({"id": self._id, "model": self._model_name, "results": results}, usage)


FORMATS = {
    "/v1/chat/completions": ChatFormat, "/v1/embeddings": EmbeddingFormat, "/v1/rerank": RerankFormat,
    "/v1/score": ScoreFormat,
}  # fmt: skip


def format_of(plan: RequestPlan, id: str, model: ServedModel) -> CompletionFormat:
    """Return the format of the plan's endpoint, for the response with this id."""
    return FORMATS.get(plan.endpoint, CompletionFormat)(plan, id, model)
