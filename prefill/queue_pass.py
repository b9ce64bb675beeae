"""Which of a prefill worker's waiting prompts start. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..transport.messages.blocks import held
from ..transport.messages.messages import PeerId
from .chunks import PrefillSequence

if TYPE_CHECKING:
    from .scheduler import PrefillScheduler


class QueuePass:
    """One pass over the prompts that wait, most urgent first: which of them start."""

    def __init__(self, scheduler: PrefillScheduler, now: float) -> None:
        self._scheduler, self._now = scheduler, now
        running, size = scheduler.running.values(), scheduler.block_size
        self._computing = {block_hash for s in running if (block_hash := s.next_hash(size))}
        self._crowding = self._crowding_peers()
        self._starved = False  # a prompt that has waited too long gets the next blocks

    def starts(self, sequence: PrefillSequence) -> bool:
        """Start this prompt, unless it has to wait for blocks, its decode worker, cached blocks of another
        worker, or another prompt that computes its next block."""
        waits = self._starved or sequence.peer_id in self._crowding or self._now < sequence.prefix_by
        if waits or self._being_computed(sequence):
            return False
        if not self._scheduler.start(sequence, self._now):
            self._starved = self._now - sequence.arrival > self._scheduler.starving_s
            return False
        if block_hash := sequence.next_hash(self._scheduler.block_size):
            self._computing.add(block_hash)
        return True

    def _being_computed(self, sequence: PrefillSequence) -> bool:
        usable = sequence.usable_hashes(self._scheduler.block_size)
        hits = self._scheduler.blocks.match_prefix(usable)
        return hits < len(usable) and usable[hits] in self._computing

    def _crowding_peers(self) -> set[PeerId]:
        """Decode workers whose blocks, computed and not taken in, fill half of the pool while prompts for
        others wait."""
        scheduler = self._scheduler
        if len({s.peer_id for s in scheduler.waiting.values()}) < 2:
            return set()
        kept: Counter[PeerId] = Counter()
        for sequence in scheduler.pinned.values():
            kept[sequence.peer_id] += len(held(sequence.blocks)) + scheduler.fixed_blocks
        return {peer for peer, count in kept.items() if count >= scheduler.blocks.num_blocks // 2}
