"""Who is assigned what: every request in the system, every dispatch number, and each worker's share. Pure bookkeeping.

A dispatch number is never used twice. A flight has one dispatch, or two while its sequence moves from one decode worker to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .flight import Flight, Move
from .worker import Worker


class FlightTable:
    """All flights, by request and by dispatch."""

    def __init__(self) -> None:
        self.flights: dict[str, Flight] = {}
        self.by_dispatch: dict[int, Flight] = {}
        self.next_dispatch = 1

    def request_ids(self, dispatches: Iterable[int]) -> list[str]:
        """The requests behind these dispatches, for people."""
        return sorted(self.by_dispatch[d].request.request_id for d in dispatches)

    def num_by_stage(self) -> dict[str, int]:
        return dict(Counter(flight.stage for flight in self.flights.values()))

    def assign(self, flight: Flight, prefill: Worker, decode: Worker) -> None:
        """A new attempt, under a new dispatch number."""
        flight.epoch += 1
        flight.num_attempts += 1
        flight.dispatch = self._number(flight)
        flight.prefill, flight.decode = prefill, decode
        flight.route = (prefill.hello.worker_id, decode.hello.worker_id)
        flight.model = decode.hello.model
        flight.num_tokens_before = len(flight.tokens)
        num_tokens = flight.num_tokens
        flight.pending_blocks = decode.blocks_for(num_tokens)
        prefill.promise_prompt(flight.dispatch, num_tokens)
        decode.promise_sequence(flight.dispatch, flight.pending_blocks)

    def unassign(self, flight: Flight) -> None:
        """The attempt is over."""
        self.end_move(flight)
        self.unpromise_tokens(flight)
        self.unpromise_blocks(flight)
        for worker in (flight.prefill, flight.decode):
            if worker is not None:
                worker.let_go(flight.dispatch)
        self.by_dispatch.pop(flight.dispatch, None)
        flight.prefill = flight.decode = None
        flight.dispatch = -1

    def unpromise_tokens(self, flight: Flight) -> None:
        """The prompt is computed."""
        if flight.prefill is not None:
            flight.prefill.unpromise_prompt(flight.dispatch)

    def unpromise_blocks(self, flight: Flight) -> None:
        """The decode worker's own report counts the sequence's blocks from now on."""
        if flight.decode is not None:
            flight.decode.unpromise_blocks(flight.pending_blocks)
        flight.pending_blocks = 0

    def begin_move(self, flight: Flight, target: Worker, now: float) -> Move:
        """The running sequence is to go on at ``target``; until it does, both dispatches count."""
        flight.epoch += 1
        move = flight.move = Move(self._number(flight), target, target.blocks_for(flight.num_tokens), now)
        target.promise_sequence(move.dispatch, move.pending_blocks)
        return move

    def end_move(self, flight: Flight) -> Move | None:
        """It stays where it is, or the whole attempt is over. Returns the move that was under way."""
        move, flight.move = flight.move, None
        if move is not None:
            move.target.unpromise_blocks(move.pending_blocks)
            move.target.let_go(move.dispatch)
            del self.by_dispatch[move.dispatch]
        return move

    def complete_move(self, flight: Flight) -> None:
        """The sequence runs at the target: what it held where it was is gone."""
        move = self.end_move(flight)
        assert move is not None, "only a move that is under way completes"
        self.unassign(flight)
        flight.dispatch, flight.decode = move.dispatch, move.target
        flight.route = (flight.route[0], move.target.hello.worker_id)
        self.by_dispatch[move.dispatch] = flight
        move.target.promise_sequence(move.dispatch, 0)

    def _number(self, flight: Flight) -> int:
        dispatch, self.next_dispatch = self.next_dispatch, self.next_dispatch + 1
        self.by_dispatch[dispatch] = flight
        return dispatch
