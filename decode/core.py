"""What a decode worker does with every message and every finished step. Pure.

It joins the batch scheduler and the receiving side of the handoff. ``RoleCore`` has what both roles do alike.
The shell, worker/live_roles.py, carries out what ``take`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..engine.adapters.slots import LACKS, AdapterSlots, RoleAdapters
from ..engine.role_core import RoleCore
from ..engine.step.batch import SamplingState, StepOutput
from ..engine.step.constraint import CompileGrammar
from ..transport.handoff.protocol import (
    Join,
    Key,
    ReceiverAction,
    SenderAction,
    Supersede,
    ToCoordinator,
    Wait,
)
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.messages.blocks import held, root_hash
from ..transport.messages.messages import (
    Cancel,
    Drain,
    Joined,
    Meet,
    Message,
    Move,
    Offer,
    PeerId,
    Resume,
    SendPrefix,
    from_u32,
    u32_array,
)
from .answers import KEPT_S, Answers, resumed
from .moving import Moving
from .reports import Heartbeat, step_tokens
from .rows import DecodeStep
from .scheduler import DecodeScheduler


class DecodeCore(RoleCore[ReceiverAction | SenderAction, DecodeStep]):
    """One decode worker's decisions."""

    scheduler: DecodeScheduler
    _heartbeat: Heartbeat

    def __init__(
        self,
        meet: Meet,
        scheduler: DecodeScheduler,
        receiver: HandoffReceiver,
        drain_timeout_s: float = 10.0,
        tests_movers: bool = False,
        kept_s: float = KEPT_S,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """``tests_movers``: at the first meeting with another decode worker. ``kept_s``: see ``Answers``."""
        ended = scheduler.kv_blocks.ended
        coming = receiver.granting.waiting, receiver.leases.granted
        in_use = RoleAdapters(
            adapters,
            lambda: (*scheduler.running.values(), *ended),
            lambda: {incoming.adapter for of in coming for incoming in of.values()},
        )
        super().__init__(meet, drain_timeout_s, in_use, receiver.leases.free_closed)
        self.scheduler, self.receiver = scheduler, receiver
        self._kv_name = meet.model.kv_name
        self.moving = Moving(meet, scheduler, tests_movers)
        self.sender, self.prefixes = self.moving.sender, self.moving.prefixes
        self.answers = Answers(scheduler, kept_s)
        self._heartbeat = Heartbeat(scheduler, receiver, self.moving, self.answers)
        self._next_deadline = float("inf")  # of any sequence here; or earlier

    @property
    def has_actions(self) -> bool:
        """Whether there may be anything to ``take``."""
        return bool(self._actions) or self.receiver.has_actions or self.moving.has_actions

    def from_coordinator(self, message: Message, now: float) -> None:
        """Cancel, Move, SendPrefix, Resume or Drain. (Welcome and Fenced are the shell's: see
        ``drop_others`` and ``rename``.)"""
        if isinstance(message, Cancel):
            for dispatch in from_u32(message.dispatches):
                self._drop((message.coordinator, dispatch))
        elif isinstance(message, Move):
            self.moving.begin(message)
        elif isinstance(message, SendPrefix):
            self.prefixes.begin(message, now)
        elif isinstance(message, Resume):
            self._resume(message, now)
        elif isinstance(message, Drain):
            self.drain(now, message.timeout_s)

    def from_peer(self, peer: PeerId, message: Message, now: float) -> None:
        """Any message of a prefill worker, or of another decode worker that hands something over."""
        self.receiver.receive(peer, message, now)
        if isinstance(message, Offer) and message.grammar:
            self._actions.append(CompileGrammar(None, message.grammar))

    @property
    def held(self) -> list[Key]:
        return [*super().held, *self.receiver.keys(), *self.moving.keys()]

    @property
    def at_rest(self) -> bool:
        return not self.held and not any(self.block_tables())

    def schedule(self, now: float) -> DecodeStep | None:
        """The next step, made ahead if one is in flight; sequences that found no block are given back to the
        coordinator."""
        if self.has_actions:
            self._settle(now)
        step = self.scheduler.schedule()
        if self.scheduler.preempted:
            for sequence in self.scheduler.preempted:
                self._report_failed(sequence.key, "preempted", "the decode worker ran out of KV blocks")
            self.scheduler.preempted.clear()
        return step

    def complete(self, step: DecodeStep, output: StepOutput, now: float) -> None:
        """The oldest step in flight has run: all its tokens go to the coordinator in one message, or to each
        its own."""
        self.step_failures.good_step()
        result = self.scheduler.complete(step, output)
        self._heartbeat.count_step(result)
        self._actions += [ToCoordinator(message) for message in step_tokens(result, now)]
        self.answers.keep(result, now)
        for sequence, reason in result.failed.items():
            self._report_failed(sequence.key, "refused", f"response_format: {reason}")
        if result.finished or result.dropped:
            self.receiver.grant_waiting(now)

    def shrink_step(self, step: DecodeStep) -> None:
        """The step ran out of memory: its younger sequences are given back to the coordinator, the others go
        on. One that was alone counts as failed, so that it is not tried for ever."""
        alone = sum(not s.ended for s in step.members) == 1
        for sequence in self.scheduler.shrink(step):
            self._report_failed(
                sequence.key,
                "internal" if alone else "preempted",
                "the decode worker ran out of memory in a step",
            )

    def tick(self, now: float) -> None:
        """At least ten times a second: deadlines and leases."""
        self.receiver.tick(now)
        for key in self.answers.tick(now):
            self._drop(key)
        self.moving.tick(now)
        if now >= self._leave_by:
            for key in self.held:
                self._fail(key, "preempted", "the decode worker leaves, and no other had room in time")
        if now >= self._next_deadline:
            running = self.scheduler.running
            for key in [key for key, s in running.items() if now >= s.deadline]:
                self._fail(key, "deadline", "the request's deadline passed on the decode worker")
            self._next_deadline = min((s.deadline for s in running.values()), default=float("inf"))

    def drop_others(self, *coordinators: int) -> None:
        """Only these coordinators' work is kept, and for a while what a client may have resumed."""
        for key in self.held:
            if key[0] in coordinators:
                self.answers.has_coordinator(key)
            elif not self.answers.outlives_coordinator(key):
                self._drop(key)

    def rename(self, meet: Meet) -> None:
        """A new incarnation, after ``drop_others``: what a client may have resumed, the prefix cache and the
        quarantine stay."""
        for key in self.scheduler.held:
            self.scheduler.resume(key)
        super().rename(meet)
        self.receiver.rename(self.worker)
        self.moving.rename(meet)

    def waits(self) -> Iterator[Wait]:
        """Everything that waits here, each until some time."""
        for sequence in self.scheduler.running.values():
            yield Wait(sequence.key, "its end", sequence.deadline)
        yield from self.receiver.waits()
        yield from self.sender.waits()

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced, owner by owner."""
        yield from self.scheduler.block_tables()
        yield from self.receiver.leases.block_tables()
        yield from self.sender.tests.block_tables()
        yield from self.prefixes.block_tables()

    def room(self) -> tuple[int, int]:
        """For the receiver: (rows free, blocks to leave for the sequences that run)."""
        running = self.scheduler.num_running + self.receiver.num_joining
        return self.scheduler.row_limit.now - running - len(self.receiver.leases.granted), running

    def _settle(self, now: float) -> None:
        if self.moving.has_actions:
            self.moving.advance(now)
            self._actions += self.moving.take()
        for action in self.receiver.take():
            if isinstance(action, Join):
                self._join(action, now)
            elif isinstance(action, Supersede):
                self._drop(action.key)
            self._actions.append(action)

    def _join(self, join: Join, now: float) -> None:
        spec = join.handoff.spec
        if (older := self.scheduler.by_request.get(spec.request_id)) is not None:
            self._drop(older.key)
        if not self.adapters.has(spec.adapter):
            self._report_failed(join.key, "handoff_failed", LACKS.format(self.worker[0]))
            self.blocks.release(held(join.blocks) + join.spare)
            return
        tokens = u32_array(spec.token_ids)
        output = [*tokens[spec.num_prompt_tokens :], join.handoff.token]
        state = SamplingState(
            spec.sampling,
            tokens[: spec.num_prompt_tokens],
            output,
            adapter=spec.adapter,
            rope_shift=spec.rope_shift,
        )
        last_hash = join.last_hash or root_hash(self._kv_name, spec.salt, spec.adapter)
        self._actions.append(ToCoordinator(join.message(len(output) - 1)))
        self.scheduler.join(
            join.key,
            spec.request_id,
            state,
            join.blocks,
            last_hash,
            now + spec.deadline_s,
            now,
            spec.answer_id,
            join.spare,
        )
        self._next_deadline = min(self._next_deadline, now + spec.deadline_s)
        self._compile_grammar(join.key, state)

    def _resume(self, order: Resume, now: float) -> None:
        """Have the coordinator that asks own the answer; one that has it and lives computes it anew."""
        key = (order.coordinator, order.dispatch)
        if (sequence := self.answers.running(order.answer_id)) is not None:
            if sequence.key == key:
                return  # it was asked twice
            self._report_failed(sequence.key, "preempted", "its client has come to another coordinator")
            self.scheduler.rename(sequence, key, order.request_id, now + order.deadline_s)
            self._next_deadline = min(self._next_deadline, sequence.deadline)
            if sequence.state.lacks_matcher:  # the one that is being compiled is for the key before
                self._compile_grammar(key, sequence.state)
            tokens, reason = sequence.state.output_token_ids, None
        elif (answer := self.answers.complete(order.answer_id)) is not None:
            tokens, reason = answer.tokens, answer.reason
        else:
            self._report_failed(key, "preempted", "the answer is not kept any more")
            return
        self._actions += [ToCoordinator(message) for message in resumed(order, tokens, reason)]
        if reason is None:
            joined = Joined(coordinator=key[0], dispatch=key[1], index=len(tokens) - 1, token=tokens[-1])
            self._actions.append(ToCoordinator(joined))

    def _drop(self, key: Key) -> None:
        self.moving.cancel(key)
        self.prefixes.cancel(key)
        self.receiver.cancel(key)
        self.scheduler.drop(key)
