"""What the cores of both roles have in common: the drain, steps that fail, reports, grammars. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import Generic, Protocol, TypeVar

from ..transport.handoff.protocol import Key, ToCoordinator
from ..transport.messages.messages import BlockEvents, FailureKind, Load, Meet, PeerId, RequestFailed
from ..transport.process.reports import CacheReporter
from .adapters.slots import RoleAdapters
from .cache.block_manager import BlockManager
from .step.batch import SamplingState
from .step.constraint import CompileGrammar, TokenMatcher

Action = TypeVar("Action")
Step = TypeVar("Step")
StepIn = TypeVar("StepIn", contravariant=True)
BROKEN_AFTER = 3


def failed(key: Key, kind: FailureKind, reason: str) -> ToCoordinator:
    """Report that a worker does no more for this dispatch."""
    message = RequestFailed(coordinator=key[0], dispatch=key[1], kind=kind, message=reason[:4096])
    return ToCoordinator(message)


class StepFailures:
    """Counts requests that failed alone in a step, without a good step between.

    Such a request is returned and retried elsewhere. Several in a row mean that the worker is broken, for
    example that its GPU's context is lost."""

    def __init__(self) -> None:
        self._requests: set[str] = set()

    def book(self, request_id: str) -> None:
        """It was alone in a step that raised."""
        self._requests.add(request_id)

    def good_step(self) -> None:
        """One has run."""
        if self._requests:
            self._requests.clear()

    @property
    def means_broken(self) -> bool:
        """Whether only another process helps."""
        return len(self._requests) >= BROKEN_AFTER


class SizeLimit:
    """How large a step may be: less for a while after one that ran out of memory."""

    def __init__(self, most: int, good_steps: int, larger: Callable[[int], int]) -> None:
        """``larger``: the limit after ``good_steps`` good steps at this one."""
        self.now = self._most = most
        self._good_steps, self._larger = good_steps, larger
        self._num_good = 0

    def lower(self, limit: int) -> None:
        """A step ran out of memory."""
        self.now, self._num_good = limit, 0

    def good_step(self) -> None:
        """A step had enough."""
        if self.now < self._most:
            self._num_good += 1
            if self._num_good == self._good_steps:
                self.now, self._num_good = min(self._larger(self.now), self._most), 0


class RoleSequence(Protocol):
    """A prompt, or a sequence that generates."""

    key: Key
    state: SamplingState

    @property
    def request_id(self) -> str: ...


class RoleScheduler(Protocol[StepIn]):
    """A role's scheduler, as far as both are alike."""

    blocks: BlockManager

    @property
    def held(self) -> list[Key]: ...
    def get(self, key: Key) -> RoleSequence | None: ...
    def separate(self, step: StepIn, shared: bool = False) -> Sequence[RoleSequence]: ...
    def skip(self, step: StepIn) -> None: ...


class RoleHeartbeat(Protocol):
    """A role's load, and the reporter of its prefix cache."""

    cache: CacheReporter

    def load(self, worker: PeerId, held: Sequence[Key], draining: bool, coordinator: int | None) -> Load: ...


class RoleCore(ABC, Generic[Action, Step]):
    """One role's decisions; all times are ``now`` of one monotonic clock, in seconds."""

    scheduler: RoleScheduler[Step]
    _heartbeat: RoleHeartbeat

    def __init__(
        self, meet: Meet, drain_timeout_s: float, adapters: RoleAdapters, free_closed: Callable[[], None]
    ) -> None:
        """``meet``: names the worker, and is how it introduces itself to decode workers that it hands over
        to. ``drain_timeout_s``: how long to drain by default. ``free_closed``: see ``LeaseTable``."""
        self.worker: PeerId = (meet.worker_id, meet.incarnation)
        self._drain_timeout_s = drain_timeout_s
        self.adapters, self._free_closed = adapters, free_closed
        self._leave_by = inf  # when what is left must be given back, once it drains
        self.step_failures = StepFailures()
        self._actions: list[Action | ToCoordinator | CompileGrammar] = []

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.blocks

    @property
    def held(self) -> list[Key]:
        """The dispatches that have anything here."""
        return self.scheduler.held

    def drop_others(self, *coordinators: int) -> None:
        """Only these coordinators' work is kept."""
        for key in self.held:
            if key[0] not in coordinators:
                self._drop(key)

    def rename(self, meet: Meet) -> None:
        """A new incarnation; the prefix cache stays."""
        self.worker = (meet.worker_id, meet.incarnation)

    def take(self, now: float) -> list[Action | ToCoordinator | CompileGrammar]:
        """Return the actions since the last call, in order."""
        self._settle(now)
        self._free_closed()
        actions, self._actions = self._actions, []
        return actions

    @abstractmethod
    def _settle(self, now: float) -> None:
        """Act on what the handoffs have done, and take their actions in."""

    @abstractmethod
    def _drop(self, key: Key) -> None:
        """Forget everything of a dispatch."""

    # --- draining --------------------------------------------------------------------------------

    def drain(self, now: float, timeout_s: float | None = None) -> None:
        """Take nothing new, and report that. What is left after ``timeout_s`` (default: as configured) is
        given back to the coordinator. A second call may bring that time forward, never back."""
        leave_by = now + (self._drain_timeout_s if timeout_s is None else timeout_s)
        begins, self._leave_by = not self.drains, min(leave_by, self._leave_by)
        if begins:
            self._heartbeat.cache.close()
            self.adapters.close()
            self._actions.append(ToCoordinator(self.load()))

    @property
    def drains(self) -> bool:
        """It takes nothing new, and is to leave."""
        return self._leave_by < inf

    @property
    def may_leave(self) -> bool:
        """It drains, and nothing is left here."""
        return self.drains and not self.held

    @property
    @abstractmethod
    def at_rest(self) -> bool:
        """Nothing is here, no block is referenced from here, nor may anything still be writing one."""

    # --- failures --------------------------------------------------------------------------------

    def fail_step(self, step: Step, reason: str, shared: bool = False) -> None:
        """The step raised: a sequence that was alone in it is given back to the coordinator. Several are
        tried apart, so that a request whose step raises ends no other. What follows the step is to be
        skipped. ``shared``: sequences of the other role were in it, too."""
        for sequence in self.scheduler.separate(step, shared):
            self.step_failures.book(sequence.request_id)
            self._fail(sequence.key, "internal", reason)

    def _fail(self, key: Key, kind: FailureKind, reason: str) -> None:
        self._drop(key)
        self._report_failed(key, kind, reason)

    def _report_failed(self, key: Key, kind: FailureKind, reason: str) -> None:
        self._actions.append(failed(key, kind, reason))

    # --- grammars --------------------------------------------------------------------------------

    def _compile_grammar(self, key: Key, state: SamplingState) -> None:
        """Have a new sequence's grammar compiled, if it has one."""
        if state.params.grammar:
            self._actions.append(CompileGrammar(key, state.params.grammar, tuple(state.output_token_ids)))

    def grammar_compiled(self, key: Key, matcher: TokenMatcher) -> None:
        """Answers CompileGrammar: the sequence's next token may be sampled."""
        if (sequence := self.scheduler.get(key)) is not None:
            sequence.state.matcher = matcher

    def grammar_failed(self, key: Key, reason: str) -> None:
        """Answers CompileGrammar: no worker could."""
        if self.scheduler.get(key) is not None:
            self._fail(key, "refused", f"response_format: {reason}")

    # --- reports ---------------------------------------------------------------------------------

    def load(self, coordinator: int | None = None) -> Load:
        """Return the heartbeat for one of several coordinators; None: for the only one."""
        return self._heartbeat.load(self.worker, self.held, self.drains, coordinator)

    def block_events(self, everything: bool = False) -> BlockEvents | None:
        """Return the changes of the prefix cache; with ``everything``, its whole contents. None while
        draining: the role that takes over the same blocks reports them."""
        if self.drains:
            return None
        return self._heartbeat.cache.report(self.worker, everything, self.adapters.take(everything))
