"""One request in the system: where it stands, what its client already has, and where its time went. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...transport.handoff.block_hash import chain, root_hash
from ...transport.messages.messages import FinishReason, Message, ModelIdentity, RequestSpec, TokenLogprobs, u32
from .attempt_times import AttemptTimes
from .recovery import Recovery
from .request import Ended, GenerationRequest
from .routing import Need
from .time_ledger import TimeLedger
from .worker import Worker, WorkerId

Stage = Literal["queue", "prefill", "handoff", "decode"]


class Push(NamedTuple):
    """The next output token of a request."""

    request: GenerationRequest
    token: int
    logprobs: TokenLogprobs | None


class PushPromptLogprobs(NamedTuple):
    request: GenerationRequest
    logprobs: tuple[TokenLogprobs, ...]


class End(NamedTuple):
    """The one terminal event of a request."""

    request: GenerationRequest
    ended: Ended


class Send(NamedTuple):
    worker: WorkerId
    message: Message


Action = Push | PushPromptLogprobs | End | Send


@dataclass(frozen=True, slots=True)
class Move:
    """A running sequence on its way to another decode worker."""

    dispatch: int
    target: Worker
    pending_blocks: int  # promised to the target
    since: float


@dataclass(slots=True, eq=False)
class Flight:
    """A request from submission to its terminal event. ``dispatch`` is -1 while it waits in the coordinator."""

    request: GenerationRequest
    mark: float  # when the current stage began
    stage: Stage = "queue"
    epoch: int = -1
    dispatch: int = -1
    prefill: Worker | None = None
    decode: Worker | None = None
    route: tuple[str, str] = ("", "")  # the prefill and the decode worker of the last attempt
    tokens: list[int] = field(default_factory=list)
    token_at: float = 0.0  # when the newest of them came
    num_attempts: int = 0
    num_tokens_before: int = 0  # this attempt, or when it was last cleared of deaths
    num_failures: int = 0  # in a row, without progress
    not_before: float = 0.0  # it is dispatched again
    avoid: Worker | None = None  # where the last attempt failed: rather not there again
    recovery: Recovery | None = None  # it was dispatched again, and has no new token yet
    num_deaths: int = 0  # in a row, without enough progress: workers that died while they ran it
    num_deaths_ever: int = 0
    suspect: bool = False  # it may be what kills workers
    excused: bool = False  # of the last death that it met, for a suspect ran there too
    move: Move | None = None
    moved_at: float = -1e9  # when a move was last given up
    num_cached_tokens: int | None = None  # of the prompt, found in a prefix cache, as the first attempt to be heard of said
    pending_blocks: int = 0  # promised to the decode worker
    model: ModelIdentity | None = None  # of the workers of the last attempt
    charged: float = 0.0  # of its tenant's share
    num_charged_tokens: int = -1  # output tokens in that; -1: it is to be booked anew
    owes_prompt_logprobs: bool = False
    early: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)  # tokens that overtook the prompt's logprobs
    early_finish: FinishReason | None = None
    named: tuple[str, int, list[bytes]] | None = None  # fingerprint, number of tokens, and the hashes for them
    prompt: bytes = b""  # its tokens as uint32, once they were needed
    ledger: TimeLedger = field(init=False)
    times: AttemptTimes | None = None  # of this attempt

    def __post_init__(self) -> None:
        self.ledger = TimeLedger("parse", self.request.arrival)
        self.ledger.enter(self.stage, self.mark)

    @property
    def most_tokens(self) -> int:
        """Of prompt and output, if all of the output comes that may."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def num_received(self) -> int:
        """Output tokens that have arrived: with the client, or held back."""
        return len(self.tokens) + len(self.early)

    @property
    def num_gained(self) -> int:
        """Tokens that this attempt has brought (since it was last cleared of deaths)."""
        return len(self.tokens) - self.num_tokens_before

    def enter(self, stage: Stage, now: float) -> None:
        """The last stage is over."""
        self.ledger.enter(stage, now)
        self.stage, self.mark = stage, now

    def hashes(self, worker: Worker) -> list[bytes]:
        """Hashes of the full blocks of all its tokens, as that worker's model and block size name them."""
        model = worker.hello.model
        if self.named is None or self.named[:2] != (model.fingerprint, self.num_tokens):
            hashes = chain(root_hash(model.fingerprint, self.request.salt), self.column(), model.block_size)
            self.named = (model.fingerprint, self.num_tokens, hashes)
        return self.named[2]

    def need(self, worker: Worker, turn: int) -> Need:
        """What is to be placed, among workers of this one's kind."""
        model = worker.hello.model
        first = chain(root_hash(model.fingerprint, self.request.salt), self.column()[: 4 * model.block_size], model.block_size)
        return Need(self.num_tokens, first[0] if first else None, lambda: self.hashes(worker), self.request.session, turn)

    def column(self) -> bytes:
        """Prompt and the tokens the client has, as uint32."""
        self.prompt = self.prompt or u32(self.request.prompt_token_ids)
        return self.prompt + u32(self.tokens) if self.tokens else self.prompt

    def spec(self, coordinator: int, now: float, dispatch: int | None = None) -> RequestSpec:
        """This attempt, as the workers hear of it; ``dispatch``: the one it is to go on under, where not its own."""
        request = self.request
        return RequestSpec(
            request_id=request.request_id,
            epoch=self.epoch,
            dispatch=self.dispatch if dispatch is None else dispatch,
            coordinator=coordinator,
            token_ids=self.column(),
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            salt=request.salt,
            prompt_logprobs=request.prompt_logprobs if self.owes_prompt_logprobs else None,
            deadline_s=max(0.0, request.deadline - now),
            traceparent=request.traceparent,
        )
