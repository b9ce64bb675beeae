"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from ..request_ids import CLIENT_ID
from .completion import PROMPT, prompts
from .fields import MAX_TOKENS, Body, Metadata, only, scalars
from .sampling import MAX_TIMEOUT_S, ServiceTier, not_zero

Encoding = Literal["float", "base64"]


class PromptFields(Body):
    """The fields of requests without tokens in their answers; they are as for completions."""

    model: str | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    request_id: Annotated[str, Field(pattern=rf"^{CLIENT_ID.pattern}$")] | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    _numbers = scalars("priority", "timeout")


class EmbeddingRequest(PromptFields):
    """POST /v1/embeddings."""

    input: Annotated[Any, BeforeValidator(prompts), PROMPT]
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Numbers of a vector that are kept, its first ones: it is normalised again."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(not_zero)] | None = (
        None
    )
    """Number of a text's first tokens that are kept, its end token among them; -1: as many as fit."""
    stream: Annotated[Any, AfterValidator(only(None, False)), WithJsonSchema({"enum": [None, False]})] = None

    _scalars = scalars("dimensions", "truncate_prompt_tokens", "add_special_tokens")
