"""What a prefill worker does with every message and every finished step. Pure.

It joins the chunk scheduler and both sides of the handoff: ``HandoffFeed`` sends, and other workers' cached
blocks come by the receiver (``SendPrefix``). ``RoleCore`` has what both roles do alike. The shell,
worker/live_roles.py, carries out what ``take`` returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from ..engine.adapters.slots import LACKS, AdapterSlots, RoleAdapters
from ..engine.role_core import RoleCore
from ..engine.step.batch import StepOutput
from ..transport.handoff.layer_slicing import WHOLE_BLOCKS, LayerSlicing
from ..transport.handoff.prefixes import PrefixSender
from ..transport.handoff.protocol import (
    Delivered,
    HandoffTimes,
    Key,
    PrefixOver,
    ReceiverAction,
    SenderAction,
    ToCoordinator,
    ToPeer,
    Undelivered,
    Wait,
    remember,
)
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.handoff.sender import HandoffSender
from ..transport.messages.messages import Cancel, Drain, Meet, Message, PeerId, Prefill, SendPrefix, from_u32
from .chunks import PrefillSequence, PrefillStep
from .handoff_feed import HandoffFeed
from .prefix_waits import PrefixWaits, refusal_of
from .reports import FirstTokens, Heartbeat
from .scheduler import PrefillScheduler
from .stored_prefixes import NO_STORE, ReadSizes, StoredPrefixes


class PrefillCore(RoleCore[SenderAction | ReceiverAction, PrefillStep]):
    """One prefill worker's decisions."""

    scheduler: PrefillScheduler
    _heartbeat: Heartbeat

    def __init__(
        self,
        meet: Meet,
        scheduler: PrefillScheduler,
        receiver: HandoffReceiver,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        times: HandoffTimes | None = None,
        drain_timeout_s: float = 10.0,
        slicing: LayerSlicing = WHOLE_BLOCKS,
        is_local: Callable[[str], bool] = lambda _: False,
        tests_movers: bool = False,
        stored: ReadSizes = NO_STORE,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """``is_local``: whether the decode worker of this name is of the same process, over the same
        blocks. ``tests_movers``: at the first meeting with a decode worker."""
        in_use = RoleAdapters(adapters, scheduler.sequences)
        super().__init__(meet, drain_timeout_s, in_use, receiver.leases.free_closed)
        self._leaving = f"prefill worker {meet.worker_id} leaves"
        self.scheduler, self.receiver = scheduler, receiver
        self.sender = HandoffSender(meet, times, slicing, scheduler.blocks if tests_movers else None)
        self.feed = HandoffFeed(self.sender, scheduler.block_size, is_local)
        self.prefixes = PrefixSender(
            self.sender,
            scheduler.blocks,
            scheduler.block_size,
            lambda: self.room()[1],
            scheduler.prompt_blocks.states.with_snapshot,
        )
        self._first_tokens = FirstTokens(eos_token_ids, max_model_len)
        self._prefix_waits = PrefixWaits()
        self.stored = StoredPrefixes(scheduler, stored, lambda: self.room()[1])
        self._heartbeat = Heartbeat(scheduler, self.sender, receiver, self._prefix_waits, self.stored)
        self._given_back = False  # what was left when the drain's time was over
        self._past: OrderedDict[Key, None] = OrderedDict()  # dispatches that have come, or were cancelled

    @property
    def has_actions(self) -> bool:
        """Whether there is anything to ``take``."""
        return bool(self._actions) or self.sender.has_actions or self.receiver.has_actions

    def _settle(self, now: float) -> None:
        for action in self.sender.take():
            if isinstance(action, Delivered | Undelivered) and self.prefixes.end(action.key):
                continue
            if isinstance(action, Delivered):
                self.scheduler.unpin(action.key)
            elif isinstance(action, Undelivered):
                self._fail(action.key, action.kind, action.message)
            self._actions.append(action)
        for received in self.receiver.take():
            if isinstance(received, PrefixOver):
                for sequence in self._prefix_waits.over(received, self.scheduler.waiting):
                    self.stored.begin(sequence, self._heartbeat.tokens_per_s, now)
            self._actions.append(received)

    def take_reports(self) -> list[Message]:
        """Return the messages to the coordinator, in order, to be sent before the other actions of ``take``:
        a first token waits for nothing."""
        reports = [action.message for action in self._actions if isinstance(action, ToCoordinator)]
        if reports:
            self._actions = [action for action in self._actions if not isinstance(action, ToCoordinator)]
        return reports

    def from_coordinator(self, message: Message, now: float) -> None:
        """Prefill, SendPrefix, Cancel or Drain. (Welcome and Fenced are the shell's: see ``drop_others`` and
        ``rename``.)"""
        if isinstance(message, Prefill):
            self._add(message, now)
        elif isinstance(message, SendPrefix):
            self.prefixes.begin(message, now)
        elif isinstance(message, Cancel):
            for dispatch in from_u32(message.dispatches):
                key = (message.coordinator, dispatch)
                remember(self._past, key, None)
                self._drop(key)
        elif isinstance(message, Drain):
            self.drain(now, message.timeout_s)

    def from_peer(self, peer: PeerId, message: Message, now: float) -> None:
        """Any message of a worker that sends cached blocks."""
        if refusal := refusal_of(message, self.scheduler.waiting, self._past, self.receiver):
            self._actions.append(ToPeer(peer, refusal))
        else:
            self.receiver.receive(peer, message, now)

    def drain(self, now: float, timeout_s: float | None = None) -> None:
        """Give back prompts that have not begun, too, and finish the rest."""
        begins = not self.drains
        super().drain(now, timeout_s)
        if begins:
            stay = [key for key, s in self.scheduler.running.items() if self.feed.stays_here(s)]
            for key in [*self.scheduler.waiting, *stay]:
                self._fail(key, "preempted", self._leaving)

    @property
    def may_leave(self) -> bool:
        return self.drains and (self._given_back or not self.held)

    @property
    def at_rest(self) -> bool:
        return not self.held and not self.sender.outgoing and not any(self.receiver.leases.block_tables())

    def schedule(self, now: float, num_decode_rows: int = 0) -> PrefillStep | None:
        """The next step, which may follow one that still runs; prompts that start with it are offered to
        their decode workers. ``num_decode_rows``: sequences that generate in the same step."""
        step = self.scheduler.schedule(now, num_decode_rows)
        for sequence in self.scheduler.started:
            if sequence.prefix_by:
                sequence.prefix_by = 0.0
                (self.stored.waits if sequence.from_store else self._prefix_waits).late(now)
            self.stored.end(sequence.key)
            self.receiver.cancel(sequence.key)  # also what it has not waited for
            if self._first_tokens.may_be_followed(sequence):
                self.feed.begin(sequence, now)
        self.scheduler.started.clear()
        return step

    def complete(self, step: PrefillStep, output: StepOutput, now: float) -> None:
        """A step has run: its finished blocks leave, and a prompt that is complete reports its first
        token."""
        self.step_failures.good_step()
        self._heartbeat.count_step(step, now)
        for row, chunk in self.scheduler.complete(step):
            sequence = chunk.sequence
            if (prompt_logprobs := output.prompt_logprobs.get(row)) is not None:
                self._first_tokens.gather(sequence.key, prompt_logprobs)
            if chunk.is_last:
                self._first_token(sequence, row, output, now)
            else:
                self.feed.blocks_ready(sequence)

    def shrink_step(self, step: PrefillStep, reason: str) -> None:
        """The step ran out of memory: it is done again in smaller ones, or fails where it is small already.
        What follows it is to be skipped."""
        for sequence in self.scheduler.shrink(step):
            self._fail(sequence.key, "internal", reason)

    def tick(self, now: float) -> None:
        """At least ten times a second: deadlines."""
        self.sender.tick(now)
        self.receiver.tick(now)
        self.stored.tick(now)
        if now >= self._leave_by and not self._given_back:
            self._given_back = True
            for key in self.held:
                self._fail(key, "preempted", self._leaving)
        for sequence in self.scheduler.sequences():
            if now >= sequence.deadline and not sequence.cancelled:
                self._fail(sequence.key, "deadline", "the request's deadline passed on the prefill worker")

    def rename(self, meet: Meet) -> None:
        """A new incarnation: all work of the old one is dropped; the prefix cache stays."""
        for key in self.held:
            self._drop(key)
        self.prefixes.cancel_all()
        super().rename(meet)
        self.sender.rename(meet)
        self.receiver.rename(self.worker)

    def waits(self) -> Iterator[Wait]:
        """Everything that waits here, each until some time."""
        pinned = self.scheduler.pinned
        for sequence in self.scheduler.sequences():
            if not sequence.cancelled:
                what = "its handoff" if sequence.key in pinned else "its turn"
                yield Wait(sequence.key, what, sequence.deadline)
        yield from self.sender.waits()
        yield from self.receiver.waits()

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced, owner by owner."""
        yield from self.scheduler.block_tables()
        yield from self.sender.tests.block_tables()
        yield from self.receiver.leases.block_tables()
        yield from self.prefixes.block_tables()
        yield from self.stored.block_tables()

    def room(self) -> tuple[int, int]:
        """For the receiver: (prefixes that may come, blocks to leave to this process's decode worker)."""
        for_decode = self.scheduler.for_decode
        return int(not self.drains), for_decode() if for_decode else 0

    def _add(self, message: Prefill, now: float) -> None:
        spec = message.spec
        key = (spec.coordinator, spec.dispatch)
        needed = -(-spec.num_tokens // self.scheduler.block_size) + self.scheduler.prompt_blocks.fixed_blocks
        if key in self._past:
            # an echo: its handoff's messages could echo too, and be taken for the new one's; or cancelled
            # before it came
            return
        remember(self._past, key, None)
        if self.drains:
            self._report_failed(key, "preempted", self._leaving)
        elif needed > self.blocks.num_blocks:
            reason = (
                f"the prompt needs {needed} KV blocks; prefill worker {self.worker[0]} has "
                f"{self.blocks.num_blocks} in all"
            )
            self._report_failed(key, "refused", reason)
        elif not self.adapters.has(spec.adapter):
            self._report_failed(key, "handoff_failed", LACKS.format(self.worker[0]))
        else:
            sequence = self.scheduler.add(spec, message.decode, now, message.images)
            if key not in self.receiver.leases.joined:  # else its prefix is here already
                num_blocks = message.num_prefix_blocks - self.blocks.match_prefix(sequence.hashes)
                num_tokens = max(0, num_blocks) * self.scheduler.block_size
                wait_s = self._prefix_waits.seconds(num_tokens, self._heartbeat.tokens_per_s, now)
                sequence.prefix_by = now + wait_s if wait_s else 0.0
            if not sequence.prefix_by:
                self.stored.begin(sequence, self._heartbeat.tokens_per_s, now)
            self._compile_grammar(key, sequence.state)

    def _first_token(self, sequence: PrefillSequence, row: int, output: StepOutput, now: float) -> None:
        state, token = sequence.state, int(output.token_ids[row])
        if state.matcher is not None and (failure := state.matcher.failure(len(state.output_token_ids))):
            self._fail(sequence.key, "refused", f"response_format: {failure}")
            return
        self._heartbeat.count_first_token()
        logprobs, embedding = output.logprobs.get(row), output.embeddings.get(row)
        report = self._first_tokens.report(sequence, token, logprobs, now, embedding)
        self._actions.append(ToCoordinator(report))
        if report.finished is not None:
            self._drop(sequence.key)
        else:
            self.feed.finish(sequence, token, report.logprobs, now)

    def _drop(self, key: Key) -> None:
        self.sender.abandon(key)
        self.stored.end(key)
        self.receiver.cancel(key)
        self._first_tokens.forget(key)
        self.scheduler.drop(key)
