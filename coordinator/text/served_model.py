"""The served model without its weights: everything that turns requests into tokens and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert

from ..chat_output.style import ChatStyle, ReasoningOption, ToolParserOption
from ..errors import (
    RETRY_AFTER_S,
    ApiError,
    CannotStart,
    InvalidRequest,
    NotFound,
    Unavailable,
    WrongField,
    on_route,
)
from ..images.files import image_rules
from ..images.rules import ImageRules, NoImages
from ..lifecycle.adapters import AdapterNames
from .chat_template import ChatTemplate
from .embeddings import EmbeddingRules
from .model_route import ModelRoute
from .reranking import RerankRules
from .tokenizer import Tokenizer, read_json

MAX_LISTED = 16  # names in an error
LONGEST = 1 << 24
"""Tokens of a context where config.json names none: the workers' lengths decide."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling of ``generation_config.json``, for fields that a request leaves out."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: int = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=-1)] = 0  # 0, -1: no bound

    @classmethod
    def of(cls, generation_config: dict[str, Any]) -> SamplingDefaults:
        """Nulls and unknown keys are ignored; 50.0 is 50. Raises ValueError."""
        try:
            return convert({k: v for k, v in generation_config.items() if v is not None}, cls, strict=False)
        except ValidationError as error:
            raise ValueError(f"generation_config.json: {error}; correct it") from error


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``aliases``: further names that requests may give; answers have ``name``, or an adapter's name."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    longest: int
    """Most tokens of prompt and output together, by the model or the settings."""
    vocab_size: int
    defaults: SamplingDefaults = SamplingDefaults()
    chat_style: ChatStyle = field(default_factory=ChatStyle)
    trusts_templates: bool = False
    """Requests may bring a chat template of their own."""
    eos_token_ids: frozenset[int] = frozenset()
    architecture: str = ""
    """The checkpoint's ``model_type``."""
    aliases: tuple[str, ...] = ()
    embeddings: EmbeddingRules = field(default_factory=EmbeddingRules)
    rerank: RerankRules = field(default_factory=RerankRules)
    images: ImageRules | NoImages = field(default_factory=NoImages)
    created: int = field(default_factory=lambda: int(time.time()))
    workers_hold: Callable[[], int] = lambda: 0
    """The longest sequence that every worker holds; 0: not known yet."""
    adapters: Callable[[], AdapterNames] = AdapterNames
    """The adapters that workers have."""

    @property
    def names(self) -> Sequence[str]:
        """The model's own names, without adapters."""
        return (self.name, *self.aliases)

    def listed(self) -> list[str]:
        """Return all names that requests may give now."""
        return [*self.names, *self.adapters().served]

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together that are served now."""
        return min(self.longest, self.workers_hold() or self.longest)

    @property
    def template_source(self) -> str:
        """The chat template's; empty: there is none."""
        return self.chat_template.source if self.chat_template is not None else ""

    @classmethod
    def load(
        cls,
        folder: Path,
        name: str,
        aliases: Sequence[str] = (),
        *,
        max_model_len: int | None = None,
        image_max_pixels: int | None = None,
        tool_parser: ToolParserOption = "auto",
        reasoning_parser: ReasoningOption = "auto",
        trusts_templates: bool = False,
        workers_hold: Callable[[], int] = lambda: 0,
        adapters: Callable[[], AdapterNames] = AdapterNames,
    ) -> ServedModel:
        """Read a checkpoint folder. Raises CannotStart."""
        try:
            config = read_json(folder / "config.json")
            if not config:
                raise ValueError(f"{folder / 'config.json'} does not exist or is empty")
            whole = config
            config = whole | (whole.get("text_config") or {})  # a model for text and images
            longest = config.get("max_position_embeddings", LONGEST)  # Gemma 3's names neither of the two
            vocab_size = config.get("vocab_size", 0)
            if not isinstance(longest, int) or not isinstance(vocab_size, int):
                raise ValueError(
                    f"{folder / 'config.json'}: max_position_embeddings and vocab_size must be whole numbers"
                )
            if max_model_len is not None and max_model_len > longest:
                raise ValueError(
                    f"--max-model-len {max_model_len}: the model's context ends at {longest} tokens"
                )
            generation = read_json(folder / "generation_config.json")
            eos = generation.get("eos_token_id", config.get("eos_token_id"))
            tokenizer = Tokenizer.load(folder, vocab_size=vocab_size)
            template = ChatTemplate.load(folder, tokenizer)
            return cls(
                name=name,
                aliases=tuple(aliases),
                tokenizer=tokenizer,
                chat_template=template,
                chat_style=ChatStyle.of(
                    template.source if template is not None else "", tool_parser, reasoning_parser
                ),
                longest=max_model_len or longest,
                vocab_size=vocab_size or len(tokenizer.table.pieces),
                embeddings=EmbeddingRules.load(folder, config, tokenizer),
                rerank=RerankRules.load(folder, template.source if template is not None else "", vocab_size),
                images=image_rules(
                    whole,
                    read_json(folder / "preprocessor_config.json"),
                    read_json(folder / "processor_config.json"),
                    tokenizer.fast.token_to_id,
                ).bounded_by(image_max_pixels),
                architecture=str(config.get("model_type", "unknown")),
                defaults=SamplingDefaults.of(generation),
                eos_token_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
                trusts_templates=trusts_templates,
                workers_hold=workers_hold,
                adapters=adapters,
            )
        except (OSError, ValueError) as error:
            raise CannotStart(str(error)) from error
        except (TypeError, LookupError, AttributeError) as error:
            what = f"a JSON file has a value of the wrong type ({error!r:.200}); download it again"
            raise CannotStart(f"{folder}: {what}") from error

    def template_for(self, source: str | None) -> ChatTemplate:
        """Return the model's chat template, or that of a request. Raises InvalidRequest."""
        if source is not None:
            if not self.trusts_templates:
                raise WrongField(
                    "chat_template",
                    "this server renders with the model's own template alone; leave it out, "
                    "and pass variables in chat_template_kwargs (--trust-request-chat-template allows it)",
                )
            try:
                return _compiled(source, tuple(self.tokenizer.special_tokens().items()))
            except ValueError as error:
                raise WrongField("chat_template", error) from error
        if self.chat_template is None:
            raise InvalidRequest(
                f"The model {self.name!r} has no chat template; use /v1/completions.", param="messages"
            )
        return self.chat_template

    def shown_name(self, name: str | None) -> str:
        """Return the name that answers have. A request that names no model means the model itself."""
        return self.name if name is None or name in self.names else name

    def adapter(self, shown_name: str) -> str:
        """Return the content of the adapter of this name; empty: there is none."""
        served, absent, _ = self.adapters()
        return served.get(shown_name) or absent.get(shown_name) or ""


class ServedModels:
    """The models of one server, and the routes to them. A request that names none means the first."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        refusal: Callable[[ServedModel], ApiError | None] = lambda _: None,
    ) -> None:
        """``refusal``: the error that a new request for this model would get now; None: it is taken."""
        self.all = tuple(models)
        self.first = self.all[0]
        self.routes: Mapping[str, ModelRoute] = {}
        """By name; replaced as a whole."""
        self.refusal = refusal
        self.own = {name: model for model in self.all for name in model.names}
        """By each name, without adapters and routes."""

    def listed(self) -> Iterator[tuple[str, ServedModel]]:
        """Yield all names that requests may give now, with their models; a route's has its largest share."""
        for model in self.all:
            yield from ((name, model) for name in model.listed() if name not in self.routes)
        for route in self.routes.values():
            yield route.name, self.own[route.main]

    def chosen(self, route: ModelRoute, key: str, prefers: str = "") -> tuple[ServedModel, ApiError | None]:
        """Return the model that a route has for a request: the first that can take it, in the order of
        ``ModelRoute.order``. Where none can: the first of all, and its error."""
        found: tuple[ServedModel, ApiError] | None = None
        for target in route.order(key, prefers):
            model = self.own[target]
            if (refusal := self.refusal(model)) is None:
                return model, None
            found = found or (model, on_route(route.name, target, refusal))
        assert found is not None, "a route has a share"
        return found

    def shown_name(self, name: str | None) -> str:
        """Return the name that answers have, of a name that may be unknown or a route's."""
        of_name = (model.name for model in self.all if name is None or name in model.names)
        return next(of_name, name or "")

    def of(self, name: str | None) -> ServedModel:
        """Return the model of this name, or that with an adapter of this name; of a route the one that
        describes it. Raises NotFound, or Unavailable where it may be the name of an adapter."""
        if name is None:
            return self.first
        if (route := self.routes.get(name)) is not None:
            return self.own[route.main]
        if (own := self.own.get(name)) is not None:
            return own
        for model in self.all:
            if model.adapter(name):
                return model
        if not all(model.adapters().complete for model in self.all):
            raise Unavailable(
                f"No model has the name {name!r}, and which adapters there are is not known yet: "
                "some worker has still to report, or none is connected.",
                retry_after_s=RETRY_AFTER_S,
            )
        names = [name for name, _ in self.listed()]
        there_are = ", ".join(map(repr, names[:MAX_LISTED]))
        more = f" and {len(names) - MAX_LISTED} more (GET /v1/models)" if len(names) > MAX_LISTED else ""
        raise NotFound(
            f"The model {name!r} does not exist; this server has {there_are}{more}.",
            param="model",
            code="model_not_found",
        )


@lru_cache(maxsize=32)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))
