"""What workers say of a request: its milestones and its tokens, each of which reaches the client once, in order. Pure."""

from __future__ import annotations

from ...transport.handoff.actions import TellTokens
from ...transport.messages.messages import FinishReason, FirstToken, Joined, RequestFailed, StepTokens, TokenLogprobs, from_u32
from .attempt_times import Heard
from .attempts import Attempts
from .flight import Flight, Push, PushPromptLogprobs
from .limits import own_deadline
from .membership import Membership
from .state import LifecycleState
from .worker import Worker


class Progress:
    """Books what attempts bring. A dispatch that nobody wants any more is disowned."""

    def __init__(self, state: LifecycleState, attempts: Attempts, members: Membership) -> None:
        self._state, self._attempts, self._members = state, attempts, members

    def step_tokens(self, worker: Worker, message: StepTokens, now: float) -> bool:
        """The hot path: one call per decode step. Whether room may have become free."""
        if message.coordinator != self._state.incarnation:
            return False
        rows = zip(from_u32(message.dispatches), from_u32(message.indices), from_u32(message.tokens), strict=False)
        by_dispatch, actions = self._state.table.by_dispatch, self._state.actions
        finished, logprobs, unknown, ended = message.finished, message.logprobs, [], False
        for row, (dispatch, index, token) in enumerate(rows):
            flight = by_dispatch.get(dispatch)
            if flight is None or flight.decode is not worker:
                unknown.append(dispatch)
            elif index != len(flight.tokens) or row in finished or flight.owes_prompt_logprobs or flight.recovery is not None:
                self._unusual_row(flight, index, token, logprobs.get(row), finished.get(row), now, message.decode_s.get(row))
                ended = True
            else:
                flight.tokens.append(token)
                flight.token_at = now
                actions.append(Push(flight.request, token, logprobs.get(row) if logprobs else None))
        if unknown:
            self._state.disown(worker, unknown)
        return ended

    def token_runs(self, worker: Worker, told: TellTokens, now: float) -> bool:
        """In virtual time: what many steps have brought. No sink hears of these tokens. Whether room may have become free."""
        if told.coordinator != self._state.incarnation:
            return False
        ended = False
        for run in told.runs:
            flight = self._state.table.by_dispatch.get(run.dispatch)
            if flight is None or flight.decode is not worker:
                self._state.disown(worker, [run.dispatch])
            elif run.first > len(flight.tokens):
                self._attempts.retry(flight, f"token {flight.num_received} was lost on the way", now)
            else:
                flight.tokens += run.token_ids[len(flight.tokens) - run.first :]
                flight.token_at = now
                if run.finished is not None:
                    self._finish(flight, run.finished, run.decode_s, now)
                    ended = True
        return ended

    def milestone(self, worker: Worker, message: FirstToken | Joined | RequestFailed, now: float) -> None:
        """A milestone of one dispatch."""
        if worker.hello.process in self._members.flips.awaited and not isinstance(message, RequestFailed):
            self._members.flips.worked(worker, now)
        flight = self._state.table.by_dispatch.get(message.dispatch)
        if flight is not None and flight.move is not None and message.dispatch == flight.move.dispatch:
            self._move_progress(flight, worker, message, now)
        elif flight is None or worker not in (flight.prefill, flight.decode):
            self._state.disown(worker, [message.dispatch])
        elif isinstance(message, FirstToken):
            self._first_token(flight, message, now)
        elif isinstance(message, Joined):
            self._joined(flight, message, now)
        elif not (flight.stage == "decode" and worker is flight.prefill):
            self._failed(flight, message, now)

    def _move_progress(self, flight: Flight, worker: Worker, message: FirstToken | Joined | RequestFailed, now: float) -> None:
        """Of a sequence on its way from one decode worker to another."""
        move = flight.move
        assert move is not None
        if isinstance(message, Joined) and worker is move.target:
            self._members.evacuation.arrived(flight, now)
            self._check_join(flight, message, now)
            self._members.evacuate(now)
        elif isinstance(message, RequestFailed) and worker in (flight.decode, move.target):
            self._state.actions += self._members.evacuation.give_up(flight, now)

    def _first_token(self, flight: Flight, message: FirstToken, now: float) -> None:
        _hear_cached(flight, message)
        if flight.stage == "prefill":
            flight.enter("handoff", now)
        if flight.times is not None:
            flight.times.first_token(self._heard(message.queue_s + message.prefill_s, now), message.prefill_s)
        if flight.recovery is not None:
            flight.recovery.queue_s, flight.recovery.prefill_s = message.queue_s, message.prefill_s
        self._state.table.unpromise_tokens(flight)
        if message.prompt_logprobs is not None and flight.owes_prompt_logprobs:
            flight.owes_prompt_logprobs = False
            self._state.actions.append(PushPromptLogprobs(flight.request, message.prompt_logprobs))
            self._push_early(flight, now)
        if message.token is None:
            self._finish(flight, "length", 0.0, now)
        elif message.index == flight.num_received:
            self._push(flight, message.token, message.logprobs, message.finished, now, 0.0)

    def _joined(self, flight: Flight, message: Joined, now: float) -> None:
        _hear_cached(flight, message)
        if flight.stage != "decode":
            flight.enter("decode", now)
            if flight.times is not None:
                flight.times.joined(self._heard(message.transfer_s, now))
        self._state.table.unpromise_tokens(flight)
        self._state.table.unpromise_blocks(flight)
        self._check_join(flight, message, now)

    def _check_join(self, flight: Flight, message: Joined, now: float) -> None:
        """Joined repeats the newest token."""
        if message.index == flight.num_received:
            self._push(flight, message.token, message.logprobs, None, now)
        elif message.index != flight.num_received - 1:
            self._attempts.retry(flight, "the decode worker joined at the wrong token", now)

    def _unusual_row(
        self,
        flight: Flight,
        index: int,
        token: int,
        logprobs: TokenLogprobs | None,
        reason: FinishReason | None,
        now: float,
        decode_s: float | None,
    ) -> None:
        if index == flight.num_received:
            self._push(flight, token, logprobs, reason, now, decode_s)
        elif index > flight.num_received:
            self._attempts.retry(flight, f"token {flight.num_received} was lost on the way", now)

    def _push(
        self,
        flight: Flight,
        token: int,
        logprobs: TokenLogprobs | None,
        finished: FinishReason | None,
        now: float,
        stage_s: float | None = None,
    ) -> None:
        """``stage_s``: how long the stage that it ends took, where it ends one and the worker says so."""
        if flight.owes_prompt_logprobs:
            flight.early.append((token, logprobs))
            flight.early_finish = finished
            return
        if flight.recovery is not None:
            self._attempts.recoveries.complete(flight.recovery, now)
            flight.recovery = None
        flight.tokens.append(token)
        flight.token_at = now
        self._state.actions.append(Push(flight.request, token, logprobs))
        if finished is not None:
            self._finish(flight, finished, stage_s, now)

    def _finish(self, flight: Flight, reason: FinishReason, stage_s: float | None, now: float) -> None:
        if flight.times is not None and stage_s is not None:
            flight.times.ended(self._heard(stage_s, now))
        self._attempts.finish(flight, reason, now)

    def _heard(self, seconds: float, now: float) -> Heard:
        return Heard(now, self._state.heard_all_at, seconds)

    def _push_early(self, flight: Flight, now: float) -> None:
        early, flight.early = flight.early, []
        finished, flight.early_finish = flight.early_finish, None
        for i, (token, logprobs) in enumerate(early):
            self._push(flight, token, logprobs, finished if i == len(early) - 1 else None, now)

    def _failed(self, flight: Flight, message: RequestFailed, now: float) -> None:
        if message.kind == "refused":
            self._attempts.fail(flight, "refused", message.message, now)
        elif message.kind == "deadline":
            self._attempts.expire(flight, own_deadline(flight), now)
        else:
            of_network = message.kind == "handoff_failed"
            self._attempts.retry(flight, message.message, now, counts=message.kind != "preempted", of_network=of_network)


def _hear_cached(flight: Flight, message: FirstToken | Joined) -> None:
    """Whichever comes first. What a later attempt finds in a cache was put there by this very request: nobody saved that."""
    if flight.num_cached_tokens is None:
        flight.num_cached_tokens = min(message.num_cached_tokens, len(flight.request.prompt_token_ids))
        flight.num_charged_tokens = -1  # its prompt costs less than was thought
