"""Workers' messages about requests: milestones and tokens. Each token reaches the client once, in order.
Pure."""

from __future__ import annotations

from ...transport.messages.messages import (
    FinishReason,
    FirstToken,
    Joined,
    RequestFailed,
    StepTokens,
    TokenLogprobs,
    from_u32,
)
from .actions import Action, Push, PushPromptLogprobs
from .limits import own_deadline
from .request import Request
from .state_machine import RequestStateMachine
from .worker import WorkerRecord

MilestoneMessage = FirstToken | Joined | RequestFailed
NO_EMBEDDING = "prefill worker {} computes no {}: it is of an older release, and is to be upgraded"


class Progress:
    """Turns messages into pushed tokens and transitions. Unknown dispatches are cancelled at the worker."""

    def __init__(self, machine: RequestStateMachine) -> None:
        self._machine = machine
        self._by_dispatch = machine.assignments.by_dispatch

    def step_tokens(self, worker: WorkerRecord, message: StepTokens, now: float) -> list[Action]:
        """Push the tokens of one decode step. This is the hot path: called once per step of each decode
        worker."""
        rows = zip(
            from_u32(message.dispatches), from_u32(message.indices), from_u32(message.tokens), strict=False
        )
        by_dispatch, finished, logprobs = self._by_dispatch, message.finished, message.logprobs
        actions: list[Action] = []
        unknown = []
        for row, (dispatch, index, token) in enumerate(rows):
            request = by_dispatch.get(dispatch)
            if request is None or request.decode is not worker:
                unknown.append(dispatch)
            elif (
                index != len(request.tokens)
                or row in finished
                or request.needs_prompt_logprobs
                or request.recovery is not None
            ):
                reason, stage_s = finished.get(row), message.decode_s.get(row)
                actions += self._unusual_row(request, index, token, logprobs.get(row), reason, stage_s, now)
            else:
                request.tokens.append(token)
                request.token_at = now
                actions.append(Push(request, token, logprobs.get(row) if logprobs else None))
        if unknown:
            actions += self._machine.cancel_at([worker], unknown)
        return actions

    def milestone(self, worker: WorkerRecord, message: MilestoneMessage, now: float) -> list[Action]:
        """Take a milestone of one dispatch."""
        request = self._by_dispatch.get(message.dispatch)
        if request is not None and request.move is not None and message.dispatch == request.move.dispatch:
            return self._move_milestone(request, worker, message, now)
        if request is None or worker not in (request.prefill, request.decode):
            return self._machine.cancel_at([worker], [message.dispatch])
        if isinstance(message, FirstToken):
            return self._first_token(request, worker, message, now)
        if isinstance(message, Joined):
            _note_cached_tokens(request, message)
            self._machine.joined(request, message.transfer_s, now)
            return self._newest_token(request, message, now)
        if request.state == "decode" and worker is request.prefill:
            return []  # the decode worker has all that it needs
        return self._failed(request, message, now)

    def _move_milestone(
        self, request: Request, worker: WorkerRecord, message: MilestoneMessage, now: float
    ) -> list[Action]:
        """Take a milestone of a sequence that moves between decode workers."""
        assert request.move is not None, "it moves"
        if isinstance(message, Joined) and worker is request.move.target:
            self._machine.complete_move(request, now)
            return self._newest_token(request, message, now)
        if isinstance(message, RequestFailed) and worker in (request.decode, request.move.target):
            return self._machine.give_up_move(request, now)
        return []

    def _first_token(
        self, request: Request, worker: WorkerRecord, message: FirstToken, now: float
    ) -> list[Action]:
        _note_cached_tokens(request, message)
        self._machine.prompt_computed(request, message.queue_s, message.prefill_s, now)
        actions: list[Action] = []
        if message.prompt_logprobs is not None and request.needs_prompt_logprobs:
            request.needs_prompt_logprobs = False
            actions.append(PushPromptLogprobs(request, message.prompt_logprobs))
            actions += self._push_held_back(request, now)
        size, whole = len(message.embedding), 4 * len(request.logits_of)
        if request.embeds and (size != whole if whole else not size):
            missing = NO_EMBEDDING.format(worker.id[0], "logits" if whole else "embeddings")
            return self._machine.fail(request, "unavailable", missing, now)
        request.embedding = message.embedding
        if message.token is None:
            actions += self._machine.finish(request, "length", 0.0, now)
        elif message.index == request.num_received:
            actions += self._push(request, message.token, message.logprobs, message.finished, 0.0, now)
        return actions

    def _newest_token(self, request: Request, message: Joined, now: float) -> list[Action]:
        """Joined repeats the newest token, which may not have arrived yet."""
        if message.index == request.num_received:
            return self._push(request, message.token, message.logprobs, None, None, now)
        if message.index != request.num_received - 1:
            return self._machine.retry(request, "the decode worker joined at the wrong token", now)
        return []

    def _unusual_row(
        self,
        request: Request,
        index: int,
        token: int,
        logprobs: TokenLogprobs | None,
        finished: FinishReason | None,
        stage_s: float | None,
        now: float,
    ) -> list[Action]:
        if index == request.num_received:
            return self._push(request, token, logprobs, finished, stage_s, now)
        if index > request.num_received:
            return self._machine.retry(request, f"token {request.num_received} was lost on the way", now)
        return []  # the client has it

    def _push(
        self,
        request: Request,
        token: int,
        logprobs: TokenLogprobs | None,
        finished: FinishReason | None,
        stage_s: float | None,
        now: float,
    ) -> list[Action]:
        """Push the next token, and finish the request with its last. ``stage_s``: see
        ``RequestStateMachine.finish``."""
        if request.needs_prompt_logprobs:
            request.held_back.append((token, logprobs))
            request.held_back_finish = finished
            return []
        if request.recovery is not None:
            self._machine.outcomes.recovered(request.recovery, now)
            request.recovery = None
        request.tokens.append(token)
        request.token_at = now
        push = Push(request, token, logprobs)
        return [push] if finished is None else [push, *self._machine.finish(request, finished, stage_s, now)]

    def _push_held_back(self, request: Request, now: float) -> list[Action]:
        held_back, request.held_back = request.held_back, []
        finished, request.held_back_finish = request.held_back_finish, None
        actions: list[Action] = []
        for i, (token, logprobs) in enumerate(held_back):
            is_last = i == len(held_back) - 1
            actions += self._push(request, token, logprobs, finished if is_last else None, None, now)
        return actions

    def _failed(self, request: Request, message: RequestFailed, now: float) -> list[Action]:
        if message.kind == "refused":
            return self._machine.fail(request, "refused", message.message, now)
        if message.kind == "deadline":
            return self._machine.miss_deadline(request, own_deadline(request), now)
        counts, in_handoff = message.kind != "preempted", message.kind == "handoff_failed"
        return self._machine.retry(request, message.message, now, counts=counts, in_handoff=in_handoff)


def _note_cached_tokens(request: Request, message: FirstToken | Joined) -> None:
    """Note, once, how many prompt tokens were cached. Later attempts find what this very request has put
    there."""
    if request.num_cached_tokens is None:
        request.num_cached_tokens = min(message.num_cached_tokens, len(request.prompt_token_ids))
        request.num_charged_tokens = -1  # its prompt costs less than was charged
