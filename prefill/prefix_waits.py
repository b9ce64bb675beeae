"""How long a prompt waits for cached blocks of another worker: as long as those that are missing here would
take to compute. Pure; times in seconds.

Blocks that come later are computed, so that a slow way costs each prompt its wait. After three in a row no
prompt waits for a while; then one tries again."""

from __future__ import annotations

from collections.abc import Container

from ..transport.handoff.protocol import Key, PrefixOver
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.messages.messages import HASH_BYTES, Message, Offer, Refuse
from .chunks import PrefillSequence

UNSEEN_S = 1.0  # before the speed is known
MIN_S = 0.05  # both workers may be in a step: few blocks would be late, and then no prompt waits for many
MAX_S = 10.0  # they may have to be computed after it
MAX_LATE, PAUSE_S = 3, 30.0


class PrefixWaits:
    """``num_late``: prompts that have waited in vain."""

    def __init__(self) -> None:
        self.num_late = 0
        self._num_in_a_row, self._late_at = 0, 0.0

    def seconds(self, num_tokens: int, tokens_per_s: float | None, now: float) -> float:
        """Return how long a prompt waits for this much. ``tokens_per_s``: of this worker; None: not known."""
        if not num_tokens or (self._num_in_a_row >= MAX_LATE and now - self._late_at < PAUSE_S):
            return 0.0
        return min(MAX_S, max(MIN_S, num_tokens / tokens_per_s)) if tokens_per_s else UNSEEN_S

    def over(self, prefix: PrefixOver, waiting: dict[Key, PrefillSequence]) -> list[PrefillSequence]:
        """Note that the blocks of this dispatch are here, or do not come: no prompt waits for them. Return
        those that did."""
        waited = [s for s in waiting.values() if (s.prefix_of or s.key) == prefix.key]
        for sequence in waited:
            sequence.prefix_by, self._num_in_a_row = 0.0, 0 if prefix.came else self._num_in_a_row
        return waited

    def late(self, now: float) -> None:
        """Note that one did not."""
        self.num_late += 1
        self._num_in_a_row, self._late_at = self._num_in_a_row + 1, now


def refusal_of(
    offer: Message, waiting: dict[Key, PrefillSequence], past: Container[Key], receiver: HandoffReceiver
) -> Refuse | None:
    """Return the answer to a prefix for a prompt that has begun, or waits for the same blocks of another."""
    if not (isinstance(offer, Offer) and offer.is_prefix):
        return None
    key, why = (offer.coordinator, offer.dispatch), ""
    coming, last = {**receiver.granting.waiting, **receiver.leases.granted}, offer.block_hashes[-HASH_BYTES:]
    if (sequence := waiting.get(key)) is None:
        why = "the prompt has begun" if key in past else ""
    elif key not in coming and (others := [k for k, i in coming.items() if last in i.hashes]):
        sequence.prefix_of, why = others[0], "the blocks come for another prompt"
    return Refuse(coordinator=key[0], dispatch=key[1], reason=why, final=False) if why else None
