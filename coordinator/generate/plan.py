"""``RequestPlan``: everything one body asks for, checked against the model.

    body --parse--> pydantic model --Planner.plan--> RequestPlan(prompts, sampling, format, limits)

A short prompt is planned on the event loop, a long one on a thread, a large body in the reader process: a
plan pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast, get_args

import orjson
from msgspec.structs import replace

from ...transport.messages.messages import SamplingParams
from ..errors import InvalidRequest, WrongField
from ..http.limits import HttpLimits
from ..lifecycle.request import PriorityClass
from ..text.served_model import ServedModel
from ..validation import validated
from .bodies.chat import ChatCompletionRequest
from .bodies.completion import CompletionRequest
from .bodies.embedding import EmbeddingRequest
from .bodies.fields import MAX_UNKNOWN
from .bodies.rerank import ScoringFields
from .bodies.sampling import OnTimeout, ServiceTier
from .chat_reading import ChatReading
from .conversation import LAST_ID_HEADER, SESSION_HEADER, AskedRequest, header_of, session_of
from .grammar import GrammarCheck, grammar_for, with_rules
from .prompts import INLINE_CHARS, GenerateRequest, Prompt, is_long, num_choices, prompts_of
from .request_sampling import sampling_of, seed_of
from .rerank_prompts import PROMPT_BODIES, PromptForm, PromptRequest, prompt_form

if TYPE_CHECKING:  # else the reader's process would import the HTTP server
    from ..http.call import Endpoint

TIMEOUT_HEADER, ON_TIMEOUT_HEADER = b"x-request-timeout", b"x-on-timeout"
PLAN_HEADERS = (TIMEOUT_HEADER, ON_TIMEOUT_HEADER, SESSION_HEADER, LAST_ID_HEADER)
"""The headers that a plan depends on."""
MANY_CHOICES = 64  # of one request, made in one turn of the loop: 4096 take 25 ms
TIER_CLASSES: dict[ServiceTier, PriorityClass] = {
    "priority": "premium", "default": "standard", "flex": "batch"
}  # fmt: skip
"""The other tiers ask for the key's own class."""
CLASS_TIERS: dict[PriorityClass, ServiceTier] = {
    "premium": "priority", "standard": "default", "free": "default", "batch": "flex",
}  # fmt: skip
"""The tier that an answer names."""
MAX_READ = 256  # prompts; a quarter of the queue that the coordinator has by default
NO_HEAD = "The model {!r} has no head (lm_head), and serves nothing but /v1/embeddings."
_RANKS: dict[PriorityClass, int] = {"premium": 0, "standard": 1, "free": 2, "batch": 3}


class RequestPlan(NamedTuple):
    """What one request asks for."""

    endpoint: Endpoint
    model: str  # the name that answers have
    # prompts
    prompts: list[Prompt]
    num_prompt_tokens: int  # of each prompt once, however many candidates it has
    # sampling
    samplings: list[SamplingParams]  # of each prompt's first candidate
    seed: int | None  # the client's; None: drawn for each candidate
    num_candidates: int  # sequences generated for each prompt
    num_best: int | None  # likeliest candidates of each prompt that are returned; None: all, in order
    # format of the answer
    reading: ChatReading | None  # how thoughts and tool calls are read out of the text; None: it is plain
    stop: Sequence[str] | None
    include_stop: bool  # what has ended the answer is shown
    hidden_ids: frozenset[int]  # tokens that end the answer and are not shown
    show_special: bool  # special tokens are written out
    num_logprobs: int | None  # alternatives reported beside each token; None: no log probabilities
    num_prompt_logprobs: int | None  # the same for the prompt's tokens
    tokens_as_ids: bool  # log probabilities name tokens by their ids
    echo: bool
    echoed: str  # what a chat's answers begin with
    streamed: bool
    return_token_ids: bool
    include_usage: bool
    usage_on_every_chunk: bool
    padded: bool  # chunks have lengths that reveal little of their text
    service_tier: ServiceTier | None  # named in the answer
    # limits
    request_id: str  # the client's name for it; empty: none
    timeout_s: float
    on_timeout: OnTimeout
    priority_class: PriorityClass
    priority: int
    cache_salt: str  # empty: the tenant's alone
    session: str  # requests of one session prefer the same workers
    unknown_fields: Sequence[str]
    adapter: str = ""  # the content that ``model`` stands for, once the request is opened
    prompt_form: PromptForm | None = None  # None: tokens are wanted
    route: str = ""  # the name that the client gave, where it is a route's

    @property
    def adapter_name(self) -> str:
        """Return the name of its adapter; empty: it is for the model itself."""
        return self.model if self.adapter else ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_candidates

    @property
    def most_prompt_logprobs(self) -> int | None:
        """Return the alternatives that are computed for each token of the prompt; None: there are none."""
        wanted = (self.num_logprobs if self.echo else None, self.num_prompt_logprobs)
        return max((count for count in wanted if count is not None), default=None)

    @property
    def num_prompt_bytes(self) -> int:
        """Return the memory of all prompts together, and of the vectors in their answer."""
        more = 0 if self.prompt_form is None else self.prompt_form.num_bytes * len(self.prompts)
        return sum([prompt.num_bytes for prompt in self.prompts]) + more

    @property
    def max_running(self) -> int:
        """Sequences that wait or run at a time; a part of those to embed or to score, which are many."""
        generates = self.prompt_form is None and self.most_prompt_logprobs is None
        return self.num_choices if generates else MAX_READ

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that any one sequence may generate."""
        return max([sampling.max_tokens for sampling in self.samplings])

    def sampling_of(self, prompt: int, candidate: int) -> SamplingParams:
        """Return the sampling of a prompt's candidate: candidates differ by their seed only."""
        first = self.samplings[prompt]
        return first if candidate == 0 else replace(first, seed=seed_of(self.seed, candidate))


def _hidden_ids(request: GenerateRequest, model: ServedModel) -> frozenset[int]:
    if request.include_stop_str_in_output:
        return frozenset()
    own = frozenset() if request.ignore_eos else model.eos_token_ids
    return own.union(request.stop_token_ids or ())


def _echoed(chat: ChatCompletionRequest) -> str:
    last = chat.messages[-1]
    return last.text if chat.echo and last.role == "assistant" else ""


def parse(endpoint: Endpoint, body: bytes | bytearray) -> AskedRequest:
    """Validate a body. Raises InvalidRequest."""
    kind = PROMPT_BODIES.get(endpoint)
    return parse_generating(endpoint, body) if kind is None else validated(kind, body)


def parse_generating(endpoint: Endpoint, body: bytes | bytearray) -> GenerateRequest:
    """Validate the body of an endpoint that generates. Raises InvalidRequest."""
    if endpoint == "/invocations":
        endpoint = _invoked(body)
    is_chat = endpoint == "/v1/chat/completions"
    return validated(ChatCompletionRequest, body) if is_chat else validated(CompletionRequest, body)


def _invoked(body: bytes | bytearray) -> Endpoint:
    """Return the endpoint that a body of /invocations is for. Raises InvalidRequest."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "/v1/chat/completions"  # whose validation describes the fault
    if isinstance(fields, dict) and "messages" not in fields:
        if "prompt" not in fields:
            raise InvalidRequest("Give `messages` for a chat completion, or `prompt` for a completion.")
        return "/v1/completions"
    return "/v1/chat/completions"


class Planner:
    """Makes the plans for one model. ``plan`` may be called on several threads."""

    def __init__(self, model: ServedModel, limits: HttpLimits) -> None:
        self.model, self._limits = model, limits
        self._grammars = GrammarCheck(model.tokenizer, model.vocab_size)

    def is_quick(self, request: AskedRequest) -> bool:
        """Whether the event loop may plan and open the request itself, in about 0.1 ms."""
        if isinstance(request, ScoringFields):
            return request.num_chars <= INLINE_CHARS and len(request.pairs) <= MANY_CHOICES
        if isinstance(request, EmbeddingRequest):
            request = CompletionRequest.model_construct(prompt=request.input)
        return not is_long(request) and not request.has_grammar and num_choices(request) <= MANY_CHOICES

    def _reads(self, chat: ChatCompletionRequest) -> bool:
        """Whether thoughts or tool calls may stand in the answers' text."""
        return self.model.chat_style.thinks or bool(chat.offered_tools)

    def plan(
        self, request: AskedRequest, headers: Mapping[bytes, bytes], own_class: PriorityClass
    ) -> RequestPlan:
        """Render, tokenize and check a request. ``own_class``: the key's.

        Raises InvalidRequest if the request does not fit the model or the server's limits.
        """
        if isinstance(request, PromptRequest):
            form, completion = prompt_form(request, self.model)
            plan = self._plan_tokens(completion, headers, own_class)
            unknown = [name[:64] for name in request.unknown_fields()[:MAX_UNKNOWN]]
            return plan._replace(endpoint=form.endpoint, prompt_form=form, unknown_fields=unknown)
        if self.model.embeddings.alone:
            raise InvalidRequest(NO_HEAD.format(self.model.name))
        return self._plan_tokens(request, headers, own_class)

    def _plan_tokens(
        self, request: GenerateRequest, headers: Mapping[bytes, bytes], own_class: PriorityClass
    ) -> RequestPlan:
        chat = request if isinstance(request, ChatCompletionRequest) else None
        echo = chat is None and bool(request.echo)
        prompts = prompts_of(request, self.model)
        grammar, param = grammar_for(request, self.model, prompts[0]) if request.has_grammar else (b"", "")
        if grammar:
            self._grammars.check(grammar, param)
        grammar = with_rules(request, self.model, grammar)
        n = request.n or 1
        priority_class = class_in_force(request.service_tier, own_class)
        return RequestPlan(
            endpoint="/v1/completions" if chat is None else "/v1/chat/completions",
            model=self.model.shown_name(request.model),
            prompts=[(prompt if echo else prompt.without_text()).packed() for prompt in prompts],
            num_prompt_tokens=sum([len(prompt.token_ids) for prompt in prompts]),
            samplings=[sampling_of(request, self.model, len(p.token_ids), grammar) for p in prompts],
            seed=request.seed,
            num_candidates=request.num_candidates,
            num_best=n if request.num_candidates > n else None,
            reading=ChatReading.of(chat, self.model) if chat is not None and self._reads(chat) else None,
            stop=request.stop,
            include_stop=bool(request.include_stop_str_in_output),
            hidden_ids=_hidden_ids(request, self.model),
            show_special=request.skip_special_tokens is False,
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.prompt_logprobs,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            echo=echo,
            echoed=_echoed(chat) if chat is not None else "",
            streamed=bool(request.stream),
            return_token_ids=bool(request.return_token_ids),
            include_usage=request.include_usage,
            usage_on_every_chunk=request.usage_on_every_chunk,
            padded=request.obfuscated,
            service_tier=CLASS_TIERS[priority_class] if request.service_tier else None,
            request_id=request.request_id or "",
            timeout_s=timeout_of(request.timeout, headers, self._limits.request_timeout_s),
            on_timeout=on_timeout_of(request, headers),
            priority_class=priority_class,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            session=session_of(request, headers),
            unknown_fields=[name[:64] for name in request.unknown_fields()[:MAX_UNKNOWN]],
        )


# --- limits --------------------------------------------------------------------------------------


def class_in_force(tier: ServiceTier | None, own: PriorityClass) -> PriorityClass:
    """Return the lower of the tier's class and the key's; asking for more is ignored, as by OpenAI."""
    return own if tier is None else max(own, TIER_CLASSES.get(tier, own), key=_RANKS.__getitem__)


def timeout_of(field: float | None, headers: Mapping[bytes, bytes], longest_s: float) -> float:
    """Return the seconds that a request may take: by the body, else the header, else ``longest_s``.

    Raises InvalidRequest where the header is not a positive number, or more than ``longest_s`` is asked for.
    """
    param, asked = "timeout", field
    if asked is None and (value := headers.get(TIMEOUT_HEADER)) is not None:
        param = TIMEOUT_HEADER.decode()
        try:
            asked = float(value)
        except ValueError:
            asked = 0.0
        if not 0 < asked < float("inf"):
            raise WrongField(param, f"{value[:40]!r} is no number of seconds above 0")
    if asked is None:
        return longest_s
    if asked > longest_s:
        raise WrongField(param, f"at most {longest_s:g} seconds are allowed here, not {asked:g}")
    return asked


def on_timeout_of(request: GenerateRequest, headers: Mapping[bytes, bytes]) -> OnTimeout:
    """Return the effect of a request's deadline on its answer: the body's ``on_timeout``, else the header's.

    Without either it is ``timeout`` for a request that sets a timeout, and so knows more than OpenAI's words,
    and ``length`` for others, whose SDK may refuse a word it does not know. Raises InvalidRequest.
    """
    name = ON_TIMEOUT_HEADER.decode()
    asked = request.on_timeout or header_of(headers, ON_TIMEOUT_HEADER)
    if not asked:
        return "timeout" if request.timeout is not None or TIMEOUT_HEADER in headers else "length"
    if asked not in get_args(OnTimeout):
        raise WrongField(name, f"{asked[:40]!r} is none of {', '.join(get_args(OnTimeout))}")
    return cast(OnTimeout, asked)
