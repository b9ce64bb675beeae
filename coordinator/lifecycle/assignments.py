"""Which requests are assigned to which workers, by dispatch number. Pure bookkeeping."""

from __future__ import annotations

from .request import PendingMove, Request
from .worker import WorkerRecord


class Assignments:
    """All requests that have not ended, and the workers' share of each.

    A dispatch number is never used twice. A request has one, or two while its sequence moves.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.by_dispatch: dict[int, Request] = {}
        self.next_dispatch = 1
        self.version = 0  # incremented whenever an attempt ends, so that workers may have room again

    def of(self, worker: WorkerRecord) -> list[Request]:
        """Return the requests that are assigned to this worker, in the order of their dispatches."""
        return [self.by_dispatch[dispatch] for dispatch in sorted(worker.dispatches)]

    def assign(self, request: Request, prefill: WorkerRecord, decode: WorkerRecord) -> None:
        """Begin a new attempt, under a new dispatch number."""
        request.epoch += 1
        request.num_attempts += 1
        request.dispatch = self._new_dispatch(request)
        request.prefill, request.decode = prefill, decode
        request.route = (prefill.hello.worker_id, decode.hello.worker_id)
        request.model = decode.hello.model
        request.num_tokens_before = len(request.tokens)
        num_tokens = request.num_tokens
        request.pending_blocks = decode.blocks_for(num_tokens)
        prefill.reserve_prompt(request.dispatch, num_tokens)
        decode.reserve_sequence(request.dispatch, request.pending_blocks)

    def assign_kept(self, request: Request, decode: WorkerRecord) -> None:
        """Begin an attempt with a sequence that is on this worker already."""
        request.epoch += 1
        request.num_attempts += 1
        request.dispatch = self._new_dispatch(request)
        request.decode, request.model = decode, decode.hello.model
        request.route = ("", decode.hello.worker_id)
        decode.reserve_sequence(request.dispatch, 0)

    def unassign(self, request: Request) -> None:
        """End the attempt: neither worker has anything of it to do."""
        self.version += 1
        self.end_move(request)
        self.release_prompt(request)
        self.release_blocks(request)
        for worker in (request.prefill, request.decode):
            if worker is not None:
                worker.release(request.dispatch)
        self.by_dispatch.pop(request.dispatch, None)
        request.prefill = request.decode = None
        request.dispatch = -1

    def release_prompt(self, request: Request) -> None:
        """Stop counting the prompt as pending: it is computed."""
        if request.prefill is not None:
            request.prefill.release_prompt(request.dispatch)

    def release_blocks(self, request: Request) -> None:
        """Stop counting the sequence's blocks as pending: the decode worker's own reports count them from
        now on."""
        if request.decode is not None:
            request.decode.release_blocks(request.pending_blocks)
        request.pending_blocks = 0

    def begin_move(self, request: Request, target: WorkerRecord, now: float) -> PendingMove:
        """Reserve a place at ``target``. Until the move completes or is given up, both dispatches count."""
        request.epoch += 1
        num_blocks = target.blocks_for(request.num_tokens)
        move = request.move = PendingMove(self._new_dispatch(request), target, num_blocks, now)
        target.reserve_sequence(move.dispatch, num_blocks)
        return move

    def end_move(self, request: Request) -> PendingMove | None:
        """Release the place at the target. Return the move that was under way, if any."""
        move, request.move = request.move, None
        if move is not None:
            move.target.release_blocks(move.pending_blocks)
            move.target.release(move.dispatch)
            del self.by_dispatch[move.dispatch]
        return move

    def complete_move(self, request: Request) -> None:
        """Assign the sequence to the target alone."""
        move = self.end_move(request)
        assert move is not None, "only a move that is under way completes"
        self.unassign(request)
        request.dispatch, request.decode = move.dispatch, move.target
        request.route = (request.route[0], move.target.hello.worker_id)
        self.by_dispatch[move.dispatch] = request
        move.target.reserve_sequence(move.dispatch, 0)

    def _new_dispatch(self, request: Request) -> int:
        dispatch, self.next_dispatch = self.next_dispatch, self.next_dispatch + 1
        self.by_dispatch[dispatch] = request
        return dispatch
