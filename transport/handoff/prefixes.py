"""Cached blocks on their way to a prefill worker whose prompt begins with them. Pure.

The coordinator orders them of any worker that has them (SendPrefix). They travel as a handoff does; the
prefill worker takes them into its prefix cache, and computes the rest. They are referenced here meanwhile.
A few leave in each turn of the loop, so that a long prefix delays no other sequence's tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from ..messages.messages import RequestSpec, SamplingParams, SendPrefix, from_hashes
from .granting import BlockPool
from .outgoing import Outgoing
from .protocol import Key, remember
from .sender import HandoffSender


class PrefixSender:
    """The prefixes that this worker sends, by ``sender``, out of ``blocks``."""

    def __init__(
        self,
        sender: HandoffSender,
        blocks: BlockPool,
        block_size: int,
        left: Callable[[], int],
        of_use: Callable[[list[bytes]], list[bytes]] = list,
    ) -> None:
        """``left`` returns how many blocks to leave to sequences that run here; ``of_use`` which blocks to
        send for a prefix of these."""
        self._sender, self._blocks, self._block_size, self._left = sender, blocks, block_size, left
        self._of_use = of_use
        self._held: dict[Key, list[int]] = {}
        self._num_left: dict[Key, int] = {}  # leading blocks that have left, of those that are not complete
        self._past: OrderedDict[Key, None] = OrderedDict()  # that have come, or were cancelled

    def begin(self, order: SendPrefix, now: float) -> None:
        """Offer what is cached here of the prefix, or inform its receiver that nothing comes."""
        key = (order.coordinator, order.dispatch)
        hashes = self._of_use(from_hashes(order.block_hashes))
        if key in self._past:
            return  # an echo: messages of the first could echo too, and be taken for the second's
        remember(self._past, key, None)
        spare = self._blocks.num_available - self._blocks.num_idle_among(hashes) - self._left()
        if not (blocks := self._blocks.acquire_prefix(hashes) if spare >= 0 else []):
            self._sender.meetings.decline(order.prefill, key)
            return
        self._held[key], self._num_left[key] = blocks, 0
        num_tokens = len(blocks) * self._block_size
        spec = RequestSpec(
            request_id=f"prefix {key[0]}-{key[1]}",
            epoch=0,
            dispatch=key[1],
            coordinator=key[0],
            token_ids=bytes(4 * num_tokens),  # the hashes name them
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=1),
            deadline_s=0.0,
        )
        self._sender.offer(order.prefill, spec, len(blocks), hashes[: len(blocks)], now, is_prefix=True)

    @property
    def pending(self) -> bool:
        """Whether ``advance`` would have any block leave."""
        return self._granted() is not None

    def advance(self, count: int, now: float) -> None:
        """Have ``count`` blocks of the oldest prefix leave."""
        if (out := self._granted()) is None or out.grant is None:
            return
        blocks, first = self._held[out.key], max(self._num_left[out.key], out.grant.num_cached_blocks)
        if first + count < len(blocks):
            self._num_left[out.key] = first + count
            self._sender.blocks_ready(out.key, blocks, first + count)
        else:
            del self._num_left[out.key]
            self._sender.finish(out.key, blocks, 0, None, now)

    def _granted(self) -> Outgoing | None:
        if not self._num_left:  # as in nearly every turn
            return None
        outgoing = (self._sender.outgoing.get(key) for key in self._num_left)
        return next((out for out in outgoing if out is not None and out.grant is not None), None)

    def end(self, key: Key) -> bool:
        """Note that this has arrived, or has failed. Return False if it is no prefix."""
        if (blocks := self._held.pop(key, None)) is None:
            return False
        self._num_left.pop(key, None)
        self._blocks.release(blocks)
        return True

    def cancel(self, *keys: Key) -> None:
        """Send these no more."""
        for key in keys:
            remember(self._past, key, None)
            if key in self._held:
                self._sender.abandon(key)
                self.end(key)

    def cancel_all(self) -> None:
        """Send none of them any more."""
        self.cancel(*self._held)

    def block_tables(self) -> Iterator[list[int]]:
        """Yield the blocks that are referenced here, prefix by prefix."""
        yield from self._held.values()
