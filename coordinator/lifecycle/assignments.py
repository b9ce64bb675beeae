"""Who is assigned what: every request in the system, every dispatch number, and each worker's share. Pure bookkeeping.

A dispatch number is never used twice. A request has one dispatch, or two while its sequence moves from one decode worker to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .request import PendingMove, Request
from .worker import Worker


class Assignments:
    """All requests, by request and by dispatch."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.by_dispatch: dict[int, Request] = {}
        self.next_dispatch = 1

    def request_ids(self, dispatches: Iterable[int]) -> list[str]:
        """The requests behind these dispatches, for people."""
        return sorted(self.by_dispatch[d].request_id for d in dispatches)

    def num_by_stage(self) -> dict[str, int]:
        return dict(Counter(request.state for request in self.requests.values()))

    def assign(self, request: Request, prefill: Worker, decode: Worker) -> None:
        """A new attempt, under a new dispatch number."""
        request.epoch += 1
        request.num_attempts += 1
        request.dispatch = self._number(request)
        request.prefill, request.decode = prefill, decode
        request.route = (prefill.hello.worker_id, decode.hello.worker_id)
        request.model = decode.hello.model
        request.num_tokens_before = len(request.tokens)
        num_tokens = request.num_tokens
        request.pending_blocks = decode.blocks_for(num_tokens)
        prefill.promise_prompt(request.dispatch, num_tokens)
        decode.promise_sequence(request.dispatch, request.pending_blocks)

    def unassign(self, request: Request) -> None:
        """The attempt is over."""
        self.end_move(request)
        self.unpromise_tokens(request)
        self.unpromise_blocks(request)
        for worker in (request.prefill, request.decode):
            if worker is not None:
                worker.let_go(request.dispatch)
        self.by_dispatch.pop(request.dispatch, None)
        request.prefill = request.decode = None
        request.dispatch = -1

    def unpromise_tokens(self, request: Request) -> None:
        """The prompt is computed."""
        if request.prefill is not None:
            request.prefill.unpromise_prompt(request.dispatch)

    def unpromise_blocks(self, request: Request) -> None:
        """The decode worker's own report counts the sequence's blocks from now on."""
        if request.decode is not None:
            request.decode.unpromise_blocks(request.pending_blocks)
        request.pending_blocks = 0

    def begin_move(self, request: Request, target: Worker, now: float) -> PendingMove:
        """The running sequence is to go on at ``target``; until it does, both dispatches count."""
        request.epoch += 1
        move = request.move = PendingMove(self._number(request), target, target.blocks_for(request.num_tokens), now)
        target.promise_sequence(move.dispatch, move.pending_blocks)
        return move

    def end_move(self, request: Request) -> PendingMove | None:
        """It stays where it is, or the whole attempt is over. Returns the move that was under way."""
        move, request.move = request.move, None
        if move is not None:
            move.target.unpromise_blocks(move.pending_blocks)
            move.target.let_go(move.dispatch)
            del self.by_dispatch[move.dispatch]
        return move

    def complete_move(self, request: Request) -> None:
        """The sequence runs at the target: what it held where it was is gone."""
        move = self.end_move(request)
        assert move is not None, "only a move that is under way completes"
        self.unassign(request)
        request.dispatch, request.decode = move.dispatch, move.target
        request.route = (request.route[0], move.target.hello.worker_id)
        self.by_dispatch[move.dispatch] = request
        move.target.promise_sequence(move.dispatch, 0)

    def _number(self, request: Request) -> int:
        dispatch, self.next_dispatch = self.next_dispatch, self.next_dispatch + 1
        self.by_dispatch[dispatch] = request
        return dispatch
