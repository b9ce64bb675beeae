"""The heartbeat of a decode worker: its load, and the changes of its prefix cache. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..transport.handoff.protocol import Key
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.messages.messages import Load, PeerId, u32
from ..transport.process.reports import CacheReporter
from .moving import Moving
from .scheduler import DecodeScheduler


class Heartbeat:
    """Counts steps; reads everything else from the scheduler and the handoff."""

    def __init__(self, scheduler: DecodeScheduler, receiver: HandoffReceiver, moving: Moving | None) -> None:
        self._scheduler, self._receiver, self._moving = scheduler, receiver, moving
        self.cache = CacheReporter(scheduler.blocks)
        self._num_steps = 0
        self._num_step_sequences = 0
        self._num_tokens = 0
        self._largest_batch = 0

    def count(self, num_steps: int, num_step_sequences: int, num_tokens: int) -> None:
        """Adds steps of equally many sequences: how many steps, sequences in all of them, and tokens reported
        to a coordinator."""
        self._num_steps += num_steps
        self._num_step_sequences += num_step_sequences
        self._num_tokens += num_tokens
        self._largest_batch = max(self._largest_batch, num_step_sequences // max(1, num_steps))

    def load(self, worker: PeerId, held: Sequence[Key], draining: bool, coordinator: int | None) -> Load:
        """Return the load for one of several coordinators; None: for the only one. ``held``: every dispatch
        with anything here."""
        own = [dispatch for owner, dispatch in held if coordinator is None or owner == coordinator]
        b, s, r = self._scheduler.blocks, self._scheduler, self._receiver
        return Load(
            worker_id=worker[0],
            incarnation=worker[1],
            blocks_free=b.num_free,
            blocks_cached=b.num_cached,
            blocks_used=b.num_used,
            blocks_leased=r.leases.num_blocks,
            num_running=s.num_running,
            num_waiting=len(r.keys()),
            num_waiting_tokens=r.granting.num_tokens,
            steps=self._num_steps,
            busy=s.num_running > 0,
            accepting=b.num_available > b.num_blocks // 16
            and s.num_running + len(r.leases.granted) < s.row_limit,
            draining=draining,
            dispatches=u32(own),
            num_others=len(held) - len(own),
            num_cache_reports=self.cache.num_reports,
            counters={
                "preemptions": s.num_preemptions,
                "output_tokens": self._num_tokens,
                "step_sequences": self._num_step_sequences,
                "corrupt_blocks": r.num_corrupt_blocks,
                "handed_over": self._moving.num_moved if self._moving else 0,
                "mover_fallbacks": self._moving.sender.num_fallbacks if self._moving else 0,
            },
            gauges={"largest_batch": self._largest_batch},
        )
