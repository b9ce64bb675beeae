"""The self-test of a mover when two workers first meet: a handoff of one block, before any prompt. Pure.

The sender fills a block of its own with bytes that were never in the peer's memory, and offers it. The peer
grants a block by the usual lease and verifies what arrives by checksum. Its Ack means that the mover maps,
copies and completes between these two. Nothing of the test joins a batch or the prefix cache, and its end is
that of any handoff: Release, Revoke, a deadline, or the peer's loss.
"""

from __future__ import annotations

import itertools

from ..messages.messages import PeerId, RequestSpec, SamplingParams, u32
from .granting import BlockPool
from .layer_slicing import WHOLE_BLOCKS
from .meetings import Contact
from .outgoing import Outgoing
from .protocol import HandoffTimes, Key, SenderAction, WriteTestBlock


class MoverTests:
    """The tests that are under way. Adds to ``actions``. ``blocks``: None where no mover is tested."""

    def __init__(self, blocks: BlockPool | None, times: HandoffTimes, actions: list[SenderAction]) -> None:
        self._blocks, self._times, self._actions = blocks, times, actions
        self._numbers = itertools.count(1)
        self._own: dict[Key, list[int]] = {}
        self.running: dict[Key, Outgoing] = {}

    def begin(self, contact: Contact, incarnation: int, now: float) -> bool:
        """Test the contact's mover. Return False where it is used untested: no two own blocks are free,
        which a prompt that waits for this test might have to free. ``incarnation``: the sender's."""
        if self._blocks is None or (own := self._blocks.allocate(2)) is None:
            return False
        self._blocks.release([own.pop()])  # left to the peer, which may be of this process
        key = (incarnation, next(self._numbers))
        spec = RequestSpec(
            request_id=f"self-test {key[0]}-{key[1]}",
            epoch=0,
            dispatch=key[1],
            coordinator=key[0],
            token_ids=u32([0]),
            num_prompt_tokens=1,
            sampling=SamplingParams(max_tokens=1),
            deadline_s=self._times.grant,
        )
        out = Outgoing(contact, spec, 1, [], WHOLE_BLOCKS, self._times, self._actions, now, is_test=True)
        self.running[key], self._own[key] = out, own
        self._actions.append(WriteTestBlock(out.peer, own[0], key))
        out.finish(own, 0, None, 0, now)
        out.send(now)
        return True

    def of(self, peer: PeerId) -> list[Outgoing]:
        """Return the tests of this peer's mover."""
        return [out for out in self.running.values() if out.peer == peer]

    def end(self, out: Outgoing, has_passed: bool) -> None:
        """End a test. Where it has not passed, stop writing and send Release."""
        del self.running[out.key]
        own = self._own[out.key]
        if not has_passed:
            out.release()
        self._actions[:] = [
            a for a in self._actions if not (isinstance(a, WriteTestBlock) and a.block == own[0])
        ]

    @property
    def has_ended(self) -> bool:
        """Whether ``free_ended`` would free any block."""
        return len(self._own) > len(self.running)

    def free_ended(self) -> None:
        """Free the own blocks of tests that have ended: no action that reads or writes them is left."""
        for key in self._own.keys() - self.running.keys():
            assert self._blocks is not None, "a test ran"
            self._blocks.release(self._own.pop(key))

    def block_tables(self) -> list[list[int]]:
        """Return the own blocks that are referenced here, test by test."""
        return list(self._own.values())
