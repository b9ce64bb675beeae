"""One request as the HTTP side hands it to the lifecycle, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...transport.messages.messages import FinishReason, ModelIdentity, Sampling, TokenLogprobs
from .time_ledger import Stages, TimeLedger

ErrorKind = Literal["overloaded", "unavailable", "deadline", "refused", "failed"]
"""overloaded: 429; unavailable (no worker): 503; deadline: 504; refused: 400; failed (retries used up): 500."""
PriorityClass = Literal["premium", "standard", "free", "batch"]
"""Best first."""


@dataclass(slots=True)
class Ended:
    """The one terminal event of a request. Exactly one of ``finish_reason`` and ``error`` is set; a cancelled request has neither.
    ``ledger``: closed at its end; None for one that was never taken in."""

    finish_reason: FinishReason | None = None
    error: ErrorKind | None = None
    message: str = ""
    retry_after_s: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_dispatches: int = 0
    prefill_worker: str = ""  # of the last attempt
    decode_worker: str = ""
    ledger: TimeLedger | None = None
    num_prompt_tokens: int = 0
    model: ModelIdentity | None = None  # of the workers of the last attempt; None: there was none

    @property
    def stages(self) -> Stages:
        return self.ledger.stages() if self.ledger else Stages()

    def kv_byte_seconds(self) -> float:
        """Bytes of KV cache times the seconds they were held for it, on all workers: its prompt's blocks during prefill, twice those during
        the handoff, and while it generates the mean of what it had at the beginning and at the end. Prefix blocks count for each who
        uses them."""
        if self.model is None:
            return 0.0
        stages, size = self.stages, self.model.block_size
        prompt, whole = -(-self.num_prompt_tokens // size), -(-(self.num_prompt_tokens + self.num_output_tokens) // size)
        seconds = prompt * (stages.prefill + 2 * stages.handoff) + (prompt + whole) / 2 * stages.decode
        return self.model.block_bytes * seconds


class Sink(Protocol):
    """Where one sequence's tokens go. Called on the event loop's thread; must not block or raise."""

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """The next output token: each index once, in order, whatever failed on the way."""

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Once, before the first token, if asked for: one entry per prompt token but the first."""

    def flush(self) -> None:
        """Called after the last push of one engine step: write what is pending to the client."""

    def end(self, ended: Ended) -> None:
        """Exactly once, after the last push."""


@dataclass(slots=True)
class GenerationRequest:
    """One sequence to generate (a client's request with n > 1 or several prompts is several of these)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    sink: Sink
    arrival: float  # monotonic seconds
    deadline: float  # monotonic seconds
    priority: int = 0  # among the requests of one tenant: lower is sooner
    salt: bytes = b""  # of its blocks' hashes: who has another one meets none of them in a prefix cache
    session: str = ""  # requests of one session like to meet the same workers
    prompt_logprobs: int | None = None
    tenant: str = ""  # whose; fair shares are counted by it
    priority_class: PriorityClass = "standard"
    traceparent: str = ""  # of its span; empty: it leaves no trace


class Dispatcher(Protocol):
    """What the HTTP side sees of the serving system."""

    def submit(self, request: GenerationRequest) -> None:
        """Takes the request in; everything that follows reaches its sink (also a refusal, possibly before this returns)."""

    def cancel(self, request_id: str) -> None:
        """The client has gone or a stop string was met: free it everywhere. The sink hears ``end`` with neither reason nor error."""

    def ready(self) -> bool:
        """True once a request has gone prefill, handoff, decode since the start, and not while all fail in one stage (``failing``)."""

    def failing(self) -> str:
        """In which stage the last requests all failed, and why; empty where they did not."""

    def gap(self) -> str:
        """Why new requests are refused now ("no decode worker is connected"), to be told to people; empty where they are taken."""

    def drain(self, worker_id: str, timeout_s: float | None) -> dict[str, object] | None:
        """Has a worker leave: it gets no new work and hands over what it runs. Returns what it holds, JSON-ready; None: no such worker."""

    def snapshot(self) -> dict[str, object]:
        """For /debug/state: JSON-ready."""
