"""One request: the client's input, its state, the tokens that the client has, and its end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ...transport.messages.blocks import chain, root_hash
from ...transport.messages.images import Image, rope_shift
from ...transport.messages.messages import (
    FinishReason,
    ModelIdentity,
    RequestSpec,
    Role,
    SamplingParams,
    TokenLogprobs,
    u32,
)
from .outcomes import Recovery
from .time_ledger import AttemptTimes, Stages, TimeLedger
from .worker import WorkerRecord

ErrorKind = Literal["overloaded", "unavailable", "deadline", "refused", "failed"]
"""overloaded: 429; unavailable (no worker): 503; deadline: 504; refused: 400; failed (retries used up):
500."""
PriorityClass = Literal["premium", "standard", "free", "batch"]
"""Best first."""
State = Literal["queue", "prefill", "handoff", "decode"]
"""See state_machine.py."""


@dataclass(slots=True)
class Ended:
    """The one terminal event of a request. Exactly one of ``finish_reason`` and ``error`` is set; a
    cancelled request has neither."""

    finish_reason: FinishReason | None = None
    error: ErrorKind | None = None
    message: str = ""
    retry_after_s: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_dispatches: int = 0
    prefill_worker: str = ""  # of the last attempt
    decode_worker: str = ""
    ledger: TimeLedger | None = None  # closed; None: the request was never admitted
    num_prompt_tokens: int = 0
    model: ModelIdentity | None = None  # of the workers of the last attempt; None: there was none
    embedding: bytes = b""  # float32, where it was asked for

    @property
    def stages(self) -> Stages:
        """Seconds by stage; all zero for a request that was never admitted."""
        return self.ledger.stages() if self.ledger else Stages()

    def kv_byte_seconds(self) -> float:
        """Return the bytes of KV cache times the seconds they were held for this request, over all workers.

        Prefill holds the prompt's blocks, the handoff holds them twice, and decode holds the mean of its
        first and its last number of blocks. A shared prefix block counts for each request that uses it.
        """
        if self.model is None:
            return 0.0
        stages, size = self.stages, self.model.block_size
        prompt = -(-self.num_prompt_tokens // size)
        whole = -(-(self.num_prompt_tokens + self.num_output_tokens) // size)
        seconds = prompt * (stages.prefill + 2 * stages.handoff) + (prompt + whole) / 2 * stages.decode
        return self.model.block_bytes * seconds


class Sink(Protocol):
    """Takes one sequence's tokens. Called on the event loop's thread; must not block or raise."""

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take the next output token. Each index comes once, in order, whatever failed on the way."""

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take one entry for each prompt token but the first. Called once, before the first token, if
        asked for."""

    def flush(self) -> None:
        """Write what is pending to the client. Called after the last push of one engine step."""

    def end(self, ended: Ended) -> None:
        """Take the terminal event. Called exactly once, after the last push."""


@dataclass(frozen=True, slots=True)
class PendingMove:
    """A running sequence on its way to another decode worker."""

    dispatch: int
    target: WorkerRecord
    pending_blocks: int  # reserved at the target
    since: float


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate, from submission to its terminal event.

    A client's call with n > 1 or several prompts makes several requests. The HTTP side sets the fields of the
    first part; the lifecycle alone writes the others. Times are seconds of a monotonic clock.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    sink: Sink
    arrival: float
    deadline: float
    priority: int = 0  # among the requests of one tenant: lower is sooner
    adapter: str = ""  # named by its content, as workers report it; empty: none
    adapter_name: str = ""  # its client's name for it
    salt: bytes = b""  # of the block hashes: prefix caches are shared only between requests of equal salt
    session: str = ""  # requests of one session prefer the same workers
    prompt_logprobs: int | None = None
    embeds: bool = False  # its prompt's embedding is wanted, and no token (``max_tokens`` 0)
    logits_of: tuple[int, ...] = ()  # in place of the embedding: the last token's logits of these tokens
    tenant: str = ""  # fair shares are counted by tenant
    priority_class: PriorityClass = "standard"
    traceparent: str = ""  # of its span; empty: it leaves no trace
    answer_id: bytes = b""  # by which its client may have the answer resumed; empty: it may not
    images: tuple[Image, ...] = ()  # of the prompt
    is_copy: bool = False  # a shadow, which is no client's: traces of the load leave it out

    # Its state.
    state: State = field(init=False, default="queue")
    entered: float = field(init=False)  # when ``state`` began
    epoch: int = field(init=False, default=-1)
    dispatch: int = field(init=False, default=-1)  # -1: no attempt is under way
    prefill: WorkerRecord | None = field(init=False, default=None)
    decode: WorkerRecord | None = field(init=False, default=None)
    move: PendingMove | None = field(init=False, default=None)
    move_failed_at: float = field(init=False, default=-1e9)  # when a move was last given up
    pending_blocks: int = field(init=False, default=0)  # reserved at the decode worker, not in its reports

    # The client's tokens.
    tokens: list[int] = field(init=False, default_factory=list)
    token_at: float = field(init=False, default=0.0)  # when the newest token came
    needs_prompt_logprobs: bool = field(init=False, default=False)
    held_back: list[tuple[int, TokenLogprobs | None]] = field(init=False, default_factory=list)
    """Tokens that came before the prompt's logprobs, which go first."""
    held_back_finish: FinishReason | None = field(init=False, default=None)
    embedding: bytes = field(init=False, default=b"")  # see ``Ended``

    # Its attempts.
    num_attempts: int = field(init=False, default=0)
    num_tokens_before: int = field(init=False, default=0)
    """Output tokens when the attempt began, or deaths were last forgiven."""
    num_failures: int = field(init=False, default=0)  # in a row, without progress
    not_before: float = field(init=False, default=0.0)  # it is not dispatched again sooner
    avoid: WorkerRecord | None = field(init=False, default=None)  # decode worker of the last failed attempt
    num_deaths: int = field(init=False, default=0)  # of its workers: in a row, without enough progress
    num_deaths_ever: int = field(init=False, default=0)
    suspect: bool = field(init=False, default=False)  # it may be what kills workers
    excused: bool = field(init=False, default=False)  # the last death it met was not charged to it
    recovery: Recovery | None = field(init=False, default=None)  # from a lost attempt until the next token
    route: tuple[str, str] = field(init=False, default=("", ""))  # prefill and decode worker, last attempt
    model: ModelIdentity | None = field(init=False, default=None)  # of the workers of the last attempt

    # Its usage.
    num_cached_tokens: int | None = field(init=False, default=None)  # of the prompt, by the first attempt
    charged: float = field(init=False, default=0.0)  # to its tenant's share
    num_charged_tokens: int = field(init=False, default=-1)  # output tokens in ``charged``; -1: charge again
    ledger: TimeLedger = field(init=False)  # set by ``admit``
    times: AttemptTimes | None = field(init=False, default=None)  # of this attempt

    _prompt_bytes: bytes = field(init=False, default=b"")
    _named: tuple[str, int, list[bytes]] | None = field(init=False, default=None)
    """Fingerprint, number of tokens, and the block hashes for these."""

    @property
    def max_tokens(self) -> int:
        """Prompt tokens plus the most output tokens that it may get."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt tokens plus the output tokens that its client has."""
        return len(self.prompt_token_ids) + len(self.tokens)

    @property
    def num_received(self) -> int:
        """Output tokens that have arrived: with the client, or held back."""
        return len(self.tokens) + len(self.held_back)

    @property
    def num_gained(self) -> int:
        """Output tokens of this attempt, since deaths were last forgiven."""
        return len(self.tokens) - self.num_tokens_before

    def admit(self, now: float) -> None:
        """Begin to wait in the queue."""
        self.needs_prompt_logprobs = self.prompt_logprobs is not None
        self.ledger = TimeLedger("parse", self.arrival)
        self.enter("queue", now)

    def enter(self, state: State, now: float) -> None:
        """Begin a state; the last one is over."""
        self.ledger.enter(state, now)
        self.state, self.entered = state, now

    def first_hash(self, worker: WorkerRecord) -> bytes | None:
        """Return the hash of the first full block, as that worker's model names it; None: there is no full
        block."""
        model = worker.hello.model
        first = self.token_bytes()[: 4 * model.block_size]
        hashes = chain(root_hash(model.kv_name, self.salt, self.adapter), first, model.block_size)
        return hashes[0] if hashes else None

    def hashes(self, worker: WorkerRecord) -> list[bytes]:
        """Return the hashes of all full blocks of its tokens, as that worker's model and block size name
        them."""
        model = worker.hello.model
        if self._named is None or self._named[:2] != (model.kv_name, self.num_tokens):
            root = root_hash(model.kv_name, self.salt, self.adapter)
            hashes = chain(root, self.token_bytes(), model.block_size)
            self._named = (model.kv_name, self.num_tokens, hashes)
        return self._named[2]

    def token_bytes(self) -> bytes:
        """Return the prompt and the tokens that its client has, as uint32."""
        self._prompt_bytes = self._prompt_bytes or u32(self.prompt_token_ids)
        return self._prompt_bytes + u32(self.tokens) if self.tokens else self._prompt_bytes

    def spec(self, coordinator: int, now: float, dispatch: int | None = None) -> RequestSpec:
        """Return this attempt as workers receive it, under ``dispatch`` if that is not its own."""
        return RequestSpec(
            request_id=self.request_id,
            epoch=self.epoch,
            dispatch=self.dispatch if dispatch is None else dispatch,
            coordinator=coordinator,
            token_ids=self.token_bytes(),
            num_prompt_tokens=len(self.prompt_token_ids),
            sampling=self.sampling,
            salt=self.salt,
            prompt_logprobs=self.prompt_logprobs if self.needs_prompt_logprobs else None,
            deadline_s=max(0.0, self.deadline - now),
            traceparent=self.traceparent,
            answer_id=self.answer_id,
            adapter=self.adapter,
            embeds=self.embeds,
            logits_of=self.logits_of,
            rope_shift=rope_shift(self.images),
        )


class Dispatcher(Protocol):
    """What the HTTP side sees of the serving system."""

    def submit(self, request: Request) -> None:
        """Take the request. All that follows reaches its sink, also a refusal, possibly before this
        returns."""

    def cancel(self, request_id: str) -> None:
        """Free the request everywhere: its client has gone, or a stop string was met. Its sink gets an
        ``Ended`` with neither reason nor error."""

    def ready(self) -> bool:
        """Whether a request has gone prefill, handoff, decode since the start, and not all fail in one
        stage now."""

    def failing(self) -> str:
        """Return in which stage the last requests all failed, and why; empty where they did not."""

    def gap(self) -> str:
        """Return why new requests are refused now ("no decode worker is connected"); empty where they are
        accepted."""

    def full(self) -> str:
        """Return why any new request is refused now for want of room ("1024 requests are waiting already");
        empty where it may be accepted."""

    def drain(self, worker_id: str, timeout_s: float | None) -> dict[str, object] | None:
        """Have a worker leave: it gets no new work and hands over what it runs. Returns what it holds,
        JSON-ready; None: there is no such worker."""

    def snapshot(self) -> dict[str, object]:
        """Return the state for /debug/state, JSON-ready."""


class Fleet(Dispatcher, Protocol):
    """The serving system, and what an operator may do with its workers."""

    def flip(self, worker_id: str, role: Role, timeout_s: float | None) -> dict[str, object] | str | None:
        """Has a worker change its role in place. Returns the change as it stands, JSON-ready; a sentence
        where it cannot; None: no such worker."""

    def flips(self) -> list[dict[str, object]]:
        """The latest changes of roles, JSON-ready, oldest first."""
