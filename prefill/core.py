"""The prefill worker without its body: what it does with every message and every finished step. Pure.

It joins the chunk scheduler and the sending side of the handoff; the shell (worker.py) carries out what ``take`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..engine.batch import Logprobs, StepOutput
from ..engine.block_manager import BlockManager
from ..engine.constraint import CompileGrammar, TokenMatcher
from ..engine.step_failures import StepFailures
from ..engine.stopping import finish_reason, last_output_index, stop_set
from ..transport.actions import Delivered, SenderAction, ToCoordinator, Undelivered
from ..transport.handoff import HandoffTimes, Key, PeerId, Wait
from ..transport.handoff_sender import HandoffSender
from ..transport.layer_slicing import WHOLE_BLOCKS, LayerSlicing
from ..transport.messages import (
    BlockEvents,
    Cancel,
    Drain,
    FailureKind,
    FinishReason,
    FirstToken,
    Load,
    Meet,
    Message,
    Prefill,
    RequestFailed,
    TokenLogprobs,
    from_u32,
    u32,
)
from ..transport.reports import CacheReporter, logprobs_message
from .scheduler import Chunk, PrefillScheduler, PrefillSequence, PrefillStep

MEMORY_OF_PAST = 8192
"""Dispatches."""
PrefillAction = ToCoordinator | SenderAction | CompileGrammar


class PrefillCore:
    """One prefill worker's decisions. ``meet`` names the worker; all times are ``now`` of one monotonic clock, in seconds."""

    def __init__(
        self,
        meet: Meet,
        scheduler: PrefillScheduler,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        times: HandoffTimes | None = None,
        drain_timeout_s: float = 10.0,
        slicing: LayerSlicing = WHOLE_BLOCKS,
        is_local: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``is_local``: whether the decode worker of this name is of the same process, over the same blocks."""
        self.worker: PeerId = (meet.worker_id, meet.incarnation)
        self._is_local = is_local
        self.scheduler = scheduler
        self.sender = HandoffSender(meet, times, slicing)
        self._eos, self._max_model_len = eos_token_ids, max_model_len
        self._cache_reporter = CacheReporter(scheduler.blocks)
        self._prompt_logprobs: dict[Key, list[TokenLogprobs]] = {}
        self._past: dict[Key, None] = {}  # dispatches that have come, or were cancelled
        self._actions: list[PrefillAction] = []
        self.num_steps = 0
        self.num_step_sequences = 0
        self.num_output_tokens = 0  # first tokens
        self.num_full_step_tokens = 0
        self.full_step_s = 0.0
        self._step_failures = StepFailures()
        self._num_in_flight = 0  # steps that are neither booked nor skipped
        self._lost_ahead = False  # one has failed, and what follows it counts for nothing
        self._step_began = 0.0  # the oldest of them
        self._drain_timeout_s = drain_timeout_s
        self._leave_by: float | None = None
        self._given_back = False  # what was left when the drain's time was over

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.blocks

    @property
    def stirs(self) -> bool:
        """Whether there is anything to ``take``."""
        return bool(self._actions) or self.sender.has_actions

    def take(self) -> list[PrefillAction]:
        """What is to be done since the last call, in order."""
        self._settle()
        actions, self._actions = self._actions, []
        return actions

    def take_reports(self) -> list[Message]:
        """What the coordinator is to be told, in order, before anything else of ``take`` is done: a first token waits for nothing."""
        reports = [action.message for action in self._actions if isinstance(action, ToCoordinator)]
        if reports:
            self._actions = [action for action in self._actions if not isinstance(action, ToCoordinator)]
        return reports

    def from_coordinator(self, message: Message, now: float) -> None:
        """Prefill, Cancel or Drain. (Welcome and Fenced are the shell's: see ``drop_others`` and ``rename``.)"""
        if isinstance(message, Prefill):
            self._add(message, now)
        elif isinstance(message, Cancel):
            for dispatch in from_u32(message.dispatches):
                self._remember((message.coordinator, dispatch))
                self._drop((message.coordinator, dispatch))
        elif isinstance(message, Drain):
            self.drain(now, message.timeout_s)

    def from_peer(self, peer: PeerId, message: Message, now: float) -> None:
        """Any message of a decode worker."""
        self.sender.receive(peer, message, now)

    def grammar_compiled(self, key: Key, matcher: TokenMatcher) -> None:
        """Answers CompileGrammar: the prompt's last chunk may be computed."""
        if (sequence := self.scheduler.get(key)) is not None:
            sequence.state.matcher = matcher

    def grammar_failed(self, key: Key, reason: str) -> None:
        """Answers CompileGrammar: no worker could."""
        if self.scheduler.get(key) is not None:
            self._fail(key, "refused", f"response_format: {reason}")

    def drain(self, now: float, timeout_s: float | None = None) -> None:
        """Says so to the coordinator, gives back what has not begun and finishes the rest. What is left after ``timeout_s`` (default: as
        configured) is given back too."""
        leave_by = now + (self._drain_timeout_s if timeout_s is None else timeout_s)
        first, self._leave_by = self._leave_by is None, leave_by if self._leave_by is None else min(leave_by, self._leave_by)
        if first:
            self._cache_reporter.close()
            self._actions.append(ToCoordinator(self.load()))
            self._give_back([*self.scheduler.waiting, *(k for k, s in self.scheduler.running.items() if self._is_local(s.peer_id[0]))])

    @property
    def drains(self) -> bool:
        """It takes nothing new, and is to leave."""
        return self._leave_by is not None

    @property
    def may_leave(self) -> bool:
        """It drains, and nothing is left here."""
        return self._leave_by is not None and (self._given_back or not self.scheduler.held)

    @property
    def at_rest(self) -> bool:
        """Nothing is computed or handed over, and no block is referenced from here."""
        return not self.scheduler.held and not len(self.sender)

    def schedule(self, now: float) -> PrefillStep | None:
        """The next step, which may follow one that still runs; prompts that start with it are offered to their decode workers."""
        if self._lost_ahead:
            return None
        step = self.scheduler.schedule(now)
        if step is not None:
            self._step_began = self._step_began if self._num_in_flight else now
            self._num_in_flight += 1
        for sequence in self.scheduler.take_started():
            self._offer(sequence, now)
        return step

    def layer_stride(self, step: PrefillStep) -> int:
        """Every how many layers ``layers_done`` is wanted while this step runs; 0: not at all."""
        strides = [self.sender.layer_stride(c.sequence.key, self._num_final_blocks(c.sequence, c.start + c.count)) for c in step.chunks]
        return min((stride for stride in strides if stride), default=0)

    def layers_done(self, step: PrefillStep, num_layers: int) -> None:
        """The running step, the oldest that is not booked, has computed the keys and values of its first ``num_layers`` layers: they may
        leave."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.in_step and not sequence.doomed:
                stop = self._num_final_blocks(sequence, chunk.start + chunk.count)
                self.sender.layers_ready(sequence.key, sequence.blocks, stop, num_layers)

    def complete(self, step: PrefillStep, output: StepOutput, now: float) -> None:
        """A step has run: its finished blocks leave, and a prompt that is complete reports its first token."""
        self.num_steps += 1
        self._step_failures.good_step()
        self.num_step_sequences += len(step.chunks)
        if self.scheduler.is_full(step):
            self.num_full_step_tokens += step.batch.num_tokens
            self.full_step_s += max(0.0, now - self._step_began)
        self._step_is_over()
        self._step_began = now  # of the next, if it is under way
        for row, chunk in enumerate(step.chunks):
            if self.scheduler.complete(chunk):
                self._gather_prompt_logprobs(chunk, output.prompt_logprobs.get(row))
                if chunk.is_last:
                    self._first_token(chunk.sequence, int(output.token_ids[row]), output.logprobs.get(row), now)
                else:
                    self._blocks_ready(chunk.sequence)

    def fail_step(self, step: PrefillStep, reason: str) -> None:
        """The step raised: the prompt that was alone in it is given back to the coordinator. Several are tried apart, so that a request
        whose step raises takes no other along. What follows the step is to be skipped."""
        if not self.scheduler.separate(step):
            self._step_failures.book(step.chunks[0].sequence.spec.request_id)
            self._give_up_step(step, reason)
        else:
            self._step_is_over(lost=True)

    @property
    def is_broken(self) -> bool:
        """Whether steps raise whoever is in them."""
        return self._step_failures.say_broken

    def _give_up_step(self, step: PrefillStep, reason: str) -> None:
        failed = [chunk.sequence.key for chunk in step.chunks if not chunk.sequence.doomed]
        self.scheduler.skip(step)
        for key in failed:
            self._fail(key, "internal", reason)
        self._step_is_over(lost=True)

    def shrink_step(self, step: PrefillStep, reason: str) -> None:
        """The step ran out of memory: it is done again in smaller ones, or fails where it is small already. What follows it is to be
        skipped."""
        if self.scheduler.shrink(step):
            self._step_is_over(lost=True)
        else:
            self._give_up_step(step, reason)

    def skip_step(self, step: PrefillStep) -> None:
        """It followed one that failed, and was not run."""
        self.scheduler.skip(step)
        self._step_is_over()

    def _step_is_over(self, lost: bool = False) -> None:
        self._num_in_flight -= 1
        self._lost_ahead = (self._lost_ahead or lost) and self._num_in_flight > 0

    def tick(self, now: float) -> None:
        """At least ten times a second: deadlines."""
        self.sender.tick(now)
        if self._leave_by is not None and now >= self._leave_by and not self._given_back:
            self._given_back = True
            self._give_back(self.scheduler.held)
        for sequence in [*self.scheduler.waiting.values(), *self.scheduler.running.values(), *self.scheduler.pinned.values()]:
            if now >= sequence.deadline and not sequence.doomed:
                self._fail(sequence.key, "deadline", "the request's deadline passed on the prefill worker")

    def drop_others(self, *coordinators: int) -> None:
        """Only these coordinators' work is kept."""
        for key in self.scheduler.held:
            if key[0] not in coordinators:
                self._drop(key)

    def rename(self, meet: Meet) -> None:
        """A new incarnation: all work of the old one is dropped; the prefix cache stays."""
        for key in self.scheduler.held:
            self._drop(key)
        self.worker = (meet.worker_id, meet.incarnation)
        self.sender.rename(meet)

    def waits(self) -> Iterator[Wait]:
        """Everything that waits here, each until some time."""
        yield from self.scheduler.waits()
        yield from self.sender.waits()

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced, owner by owner."""
        return self.scheduler.block_tables()

    def load(self, coordinator: int | None = None) -> Load:
        """The heartbeat, as it is to one of several coordinators; None: there is but one."""
        s, b = self.scheduler, self.blocks
        held = s.held
        own = [dispatch for owner, dispatch in held if coordinator is None or owner == coordinator]
        pinned = sum(len(q.blocks) for q in s.pinned.values())
        return Load(
            worker_id=self.worker[0],
            incarnation=self.worker[1],
            blocks_free=b.num_free,
            blocks_cached=b.num_cached,
            blocks_used=b.num_used,
            blocks_leased=pinned,
            num_running=len(s.running),
            num_waiting=len(s.waiting),
            num_waiting_tokens=s.num_waiting_tokens,
            steps=self.num_steps,
            busy=bool(s.waiting or s.running),
            accepting=b.num_available > b.num_blocks // 16,
            draining=self.drains,
            dispatches=u32(own),
            num_others=len(held) - len(own),
            num_others_tokens=s.num_waiting_tokens_but_of(coordinator) if len(held) > len(own) and coordinator is not None else 0,
            num_cache_reports=self._cache_reporter.num_reports,
            counters={
                "prompt_tokens": s.num_prompt_tokens,
                "output_tokens": self.num_output_tokens,
                "step_sequences": self.num_step_sequences,
                "cached_tokens": s.num_cached_tokens,
                "mover_fallbacks": self.sender.num_fallbacks,
                "full_step_tokens": self.num_full_step_tokens,
                "full_step_seconds": self.full_step_s,
            },
        )

    def block_events(self, everything: bool = False) -> BlockEvents | None:
        """What the prefix cache gained and lost; with ``everything``, all it has. Of one that leaves nobody wants to know; what takes its
        place over the same blocks does tell."""
        return None if self.drains else self._cache_reporter.report(self.worker, everything)

    def _add(self, message: Prefill, now: float) -> None:
        spec = message.spec
        key = (spec.coordinator, spec.dispatch)
        needed = -(-spec.num_tokens // self.scheduler.block_size)
        if key in self._past:
            return  # an echo: its handoff's messages could echo too, and be taken for the new one's; or cancelled before it came
        self._remember(key)
        if self.drains:
            self._say_failed(key, "preempted", f"prefill worker {self.worker[0]} leaves")
        elif needed > self.blocks.num_blocks:
            reason = f"the prompt needs {needed} KV blocks; prefill worker {self.worker[0]} has {self.blocks.num_blocks} in all"
            self._say_failed(key, "refused", reason)
        else:
            state = self.scheduler.add(spec, message.decode, now).state
            if state.params.grammar:
                self._actions.append(CompileGrammar(key, state.params.grammar, tuple(state.output_token_ids)))

    def _remember(self, key: Key) -> None:
        self._past[key] = None
        if len(self._past) > MEMORY_OF_PAST:
            del self._past[next(iter(self._past))]

    def _offer(self, sequence: PrefillSequence, now: float) -> None:
        """To a decode worker of its own process only once it is computed (``_first_token``): then its full blocks are cached there, that
        is, here, and none of them moves."""
        if self._is_local(sequence.peer_id[0]):
            return
        if last_output_index(sequence.state, self._max_model_len) > len(sequence.state.output_token_ids):
            hashes, num_blocks = sequence.hashes, len(sequence.blocks)
            self.sender.offer(sequence.decode, sequence.spec, num_blocks, hashes, now)
            self._blocks_ready(sequence)

    def _blocks_ready(self, sequence: PrefillSequence) -> None:
        self.sender.blocks_ready(sequence.key, sequence.blocks, self._num_final_blocks(sequence, sequence.num_computed))

    def _num_final_blocks(self, sequence: PrefillSequence, num_computed: int) -> int:
        return len(sequence.blocks) if num_computed == sequence.num_tokens else num_computed // self.scheduler.block_size

    def _gather_prompt_logprobs(self, chunk: Chunk, logprobs: list[Logprobs] | None) -> None:
        if logprobs is not None:
            gathered = self._prompt_logprobs.setdefault(chunk.sequence.key, [])
            gathered.extend(logprobs_message(entry) for entry in logprobs)

    def _first_token(self, sequence: PrefillSequence, token: int, logprobs: Logprobs | None, now: float) -> None:
        index = len(sequence.state.output_token_ids)
        if (matcher := sequence.state.matcher) is not None and matcher.failure:
            self._fail(sequence.key, "refused", f"response_format: {matcher.failure}")
            return
        self.num_output_tokens += 1
        finished = self._finish_reason(sequence, token, index)
        prompt_logprobs = self._prompt_logprobs.pop(sequence.key, None)
        message = FirstToken(
            coordinator=sequence.key[0],
            dispatch=sequence.key[1],
            index=index,
            token=None if sequence.scores_only else token,
            logprobs=logprobs_message(logprobs) if logprobs else None,
            prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs is not None else None,
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=max(0.0, sequence.started - sequence.arrival),
            prefill_s=max(0.0, now - sequence.started),
            finished=finished,
        )
        self._actions.append(ToCoordinator(message))
        if finished is not None:
            self._drop(sequence.key)
        else:
            if self._is_local(sequence.peer_id[0]):
                self.sender.offer(sequence.decode, sequence.spec, len(sequence.blocks), sequence.hashes, now)
            self.sender.finish(sequence.key, sequence.blocks, token, message.logprobs, now, sequence.num_cached_tokens)

    def _finish_reason(self, sequence: PrefillSequence, token: int, index: int) -> FinishReason | None:
        state = sequence.state
        if sequence.scores_only:
            return "length"
        last = last_output_index(state, self._max_model_len)
        return finish_reason(token, index, stop_set(state, self._eos), state.params.min_tokens, last)

    def _settle(self) -> None:
        for action in self.sender.take():
            if isinstance(action, Delivered):
                self.scheduler.unpin(action.key)
            elif isinstance(action, Undelivered):
                self._say_failed(action.key, action.kind, action.message)
                self._drop(action.key)
            self._actions.append(action)

    def _give_back(self, keys: list[Key]) -> None:
        for key in keys:
            self._fail(key, "preempted", f"prefill worker {self.worker[0]} leaves")

    def _fail(self, key: Key, kind: FailureKind, reason: str) -> None:
        self._drop(key)
        self._say_failed(key, kind, reason)

    def _say_failed(self, key: Key, kind: FailureKind, reason: str) -> None:
        self._actions.append(ToCoordinator(RequestFailed(coordinator=key[0], dispatch=key[1], kind=kind, message=reason[:4096])))

    def _drop(self, key: Key) -> None:
        self.sender.abandon(key)
        self._prompt_logprobs.pop(key, None)
        self.scheduler.drop(key)
