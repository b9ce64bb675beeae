"""The bodies of /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from .completion import MAX_PROMPTS
from .embedding import PromptFields
from .fields import MAX_TOKENS, STRING, invalid, only, scalars, schema


def _documents(value: Any) -> list[str]:
    """Strings, or objects with a ``text``, as Cohere's first API has them."""
    if not isinstance(value, list) or not value:
        raise invalid("must be a list of strings, one or more")
    if len(value) > MAX_PROMPTS:
        raise invalid(f"has {len(value)} documents; at most {MAX_PROMPTS} are allowed")
    found = (each.get("text") if isinstance(each, dict) else each for each in value)
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) != len(value):
        raise invalid("each must be a string, or an object with a `text`")
    return texts


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else _documents(value)


_DOCUMENT = {"anyOf": [STRING, {"type": "object", "required": ["text"], "properties": {"text": STRING}}]}
_DOCUMENTS = {"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": MAX_PROMPTS}
Texts = Annotated[Any, BeforeValidator(_texts), schema(STRING, _DOCUMENTS)]


class ScoringFields(PromptFields):
    """The fields of both endpoints."""

    truncate_prompt_tokens: Annotated[Any, AfterValidator(only(None)), WithJsonSchema({"enum": [None]})] = (
        None
    )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return each query with its document."""
        raise NotImplementedError

    @property
    def num_chars(self) -> int:
        """Return the length of all prompts together, about. They are never all in memory: each has the query
        again."""
        return sum([len(query) + len(document) for query, document in self.pairs])


class RerankRequest(ScoringFields):
    """POST /v1/rerank, as Jina's and Cohere's. Of the documents, ``top_n`` are answered (default: all), the
    best first."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Any, BeforeValidator(_documents), WithJsonSchema(_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Number of a document's first tokens that are kept."""
    return_documents: bool | None = None
    """Unless false, results have their documents."""

    _scalars = scalars("top_n", "max_tokens_per_doc", "return_documents")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]


class ScoreRequest(ScoringFields):
    """POST /v1/score, as vLLM's: each text of ``text_2`` for the one of ``text_1``, or for the one at its
    place."""

    text_1: Texts
    text_2: Texts

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            counts = f"text_1 has {len(self.text_1)} texts, text_2 {len(self.text_2)}"
            raise invalid(f"{counts}; give one text_1, or as many as text_2 has")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(first, self.text_2, strict=True))
