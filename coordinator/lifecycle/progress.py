"""What workers say of a request: its milestones and its tokens, each of which reaches the client once, in order. Pure."""

from __future__ import annotations

from ...transport.handoff.actions import TellTokens
from ...transport.messages.messages import FinishReason, FirstToken, Joined, RequestFailed, StepTokens, TokenLogprobs, from_u32
from .actions import Push, PushPromptLogprobs
from .attempts import Attempts
from .limits import own_deadline
from .membership import Membership
from .request import Request
from .state import LifecycleState
from .time_ledger import Milestone
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
            request = by_dispatch.get(dispatch)
            if request is None or request.decode is not worker:
                unknown.append(dispatch)
            elif index != len(request.tokens) or row in finished or request.needs_prompt_logprobs or request.recovery is not None:
                self._unusual_row(request, index, token, logprobs.get(row), finished.get(row), now, message.decode_s.get(row))
                ended = True
            else:
                request.tokens.append(token)
                request.token_at = now
                actions.append(Push(request, token, logprobs.get(row) if logprobs else None))
        if unknown:
            self._state.disown(worker, unknown)
        return ended

    def token_runs(self, worker: Worker, told: TellTokens, now: float) -> bool:
        """In virtual time: what many steps have brought. No sink hears of these tokens. Whether room may have become free."""
        if told.coordinator != self._state.incarnation:
            return False
        ended = False
        for run in told.runs:
            request = self._state.table.by_dispatch.get(run.dispatch)
            if request is None or request.decode is not worker:
                self._state.disown(worker, [run.dispatch])
            elif run.first > len(request.tokens):
                self._attempts.retry(request, f"token {request.num_received} was lost on the way", now)
            else:
                request.tokens += run.token_ids[len(request.tokens) - run.first :]
                request.token_at = now
                if run.finished is not None:
                    self._finish(request, run.finished, run.decode_s, now)
                    ended = True
        return ended

    def milestone(self, worker: Worker, message: FirstToken | Joined | RequestFailed, now: float) -> None:
        """A milestone of one dispatch."""
        if worker.hello.process in self._members.flips.awaited and not isinstance(message, RequestFailed):
            self._members.flips.worked(worker, now)
        request = self._state.table.by_dispatch.get(message.dispatch)
        if request is not None and request.move is not None and message.dispatch == request.move.dispatch:
            self._move_progress(request, worker, message, now)
        elif request is None or worker not in (request.prefill, request.decode):
            self._state.disown(worker, [message.dispatch])
        elif isinstance(message, FirstToken):
            self._first_token(request, message, now)
        elif isinstance(message, Joined):
            self._joined(request, message, now)
        elif not (request.state == "decode" and worker is request.prefill):
            self._failed(request, message, now)

    def _move_progress(self, request: Request, worker: Worker, message: FirstToken | Joined | RequestFailed, now: float) -> None:
        """Of a sequence on its way from one decode worker to another."""
        move = request.move
        assert move is not None
        if isinstance(message, Joined) and worker is move.target:
            self._members.evacuation.arrived(request, now)
            self._check_join(request, message, now)
            self._members.evacuate(now)
        elif isinstance(message, RequestFailed) and worker in (request.decode, move.target):
            self._state.actions += self._members.evacuation.give_up(request, now)

    def _first_token(self, request: Request, message: FirstToken, now: float) -> None:
        _hear_cached(request, message)
        if request.state == "prefill":
            request.enter("handoff", now)
        if request.times is not None:
            request.times.first_token(self._heard(message.queue_s + message.prefill_s, now), message.prefill_s)
        if request.recovery is not None:
            request.recovery.queue_s, request.recovery.prefill_s = message.queue_s, message.prefill_s
        self._state.table.unpromise_tokens(request)
        if message.prompt_logprobs is not None and request.needs_prompt_logprobs:
            request.needs_prompt_logprobs = False
            self._state.actions.append(PushPromptLogprobs(request, message.prompt_logprobs))
            self._push_early(request, now)
        if message.token is None:
            self._finish(request, "length", 0.0, now)
        elif message.index == request.num_received:
            self._push(request, message.token, message.logprobs, message.finished, now, 0.0)

    def _joined(self, request: Request, message: Joined, now: float) -> None:
        _hear_cached(request, message)
        if request.state != "decode":
            request.enter("decode", now)
            if request.times is not None:
                request.times.joined(self._heard(message.transfer_s, now))
        self._state.table.unpromise_tokens(request)
        self._state.table.unpromise_blocks(request)
        self._check_join(request, message, now)

    def _check_join(self, request: Request, message: Joined, now: float) -> None:
        """Joined repeats the newest token."""
        if message.index == request.num_received:
            self._push(request, message.token, message.logprobs, None, now)
        elif message.index != request.num_received - 1:
            self._attempts.retry(request, "the decode worker joined at the wrong token", now)

    def _unusual_row(
        self,
        request: Request,
        index: int,
        token: int,
        logprobs: TokenLogprobs | None,
        reason: FinishReason | None,
        now: float,
        decode_s: float | None,
    ) -> None:
        if index == request.num_received:
            self._push(request, token, logprobs, reason, now, decode_s)
        elif index > request.num_received:
            self._attempts.retry(request, f"token {request.num_received} was lost on the way", now)

    def _push(
        self,
        request: Request,
        token: int,
        logprobs: TokenLogprobs | None,
        finished: FinishReason | None,
        now: float,
        stage_s: float | None = None,
    ) -> None:
        """``stage_s``: how long the stage that it ends took, where it ends one and the worker says so."""
        if request.needs_prompt_logprobs:
            request.held_back.append((token, logprobs))
            request.held_back_finish = finished
            return
        if request.recovery is not None:
            self._attempts.outcomes.recovered(request.recovery, now)
            request.recovery = None
        request.tokens.append(token)
        request.token_at = now
        self._state.actions.append(Push(request, token, logprobs))
        if finished is not None:
            self._finish(request, finished, stage_s, now)

    def _finish(self, request: Request, reason: FinishReason, stage_s: float | None, now: float) -> None:
        if request.times is not None and stage_s is not None:
            request.times.ended(self._heard(stage_s, now))
        self._attempts.finish(request, reason, now)

    def _heard(self, seconds: float, now: float) -> Milestone:
        return Milestone(now, self._state.heard_all_at, seconds)

    def _push_early(self, request: Request, now: float) -> None:
        early, request.held_back = request.held_back, []
        finished, request.held_back_finish = request.held_back_finish, None
        for i, (token, logprobs) in enumerate(early):
            self._push(request, token, logprobs, finished if i == len(early) - 1 else None, now)

    def _failed(self, request: Request, message: RequestFailed, now: float) -> None:
        if message.kind == "refused":
            self._attempts.fail(request, "refused", message.message, now)
        elif message.kind == "deadline":
            self._attempts.expire(request, own_deadline(request), now)
        else:
            of_network = message.kind == "handoff_failed"
            self._attempts.retry(request, message.message, now, counts=message.kind != "preempted", of_network=of_network)


def _hear_cached(request: Request, message: FirstToken | Joined) -> None:
    """Whichever comes first. What a later attempt finds in a cache was put there by this very request: nobody saved that."""
    if request.num_cached_tokens is None:
        request.num_cached_tokens = min(message.num_cached_tokens, len(request.prompt_token_ids))
        request.num_charged_tokens = -1  # its prompt costs less than was thought
