"""The prefill workers that a decode worker has met: who they are, and how each of them writes. Pure."""

from __future__ import annotations

from collections import OrderedDict

from ..messages.incarnation import COUNT_BITS, has_ended, is_earlier
from ..messages.messages import Meet, Met, ModelIdentity, PeerId, Retire
from ..movers.interface import FALLBACK_MOVER, FORMER_NAME, SAME_HOST_MOVERS, MoverEndpoints
from .protocol import remember


class Writers:
    """Agrees with each prefill worker on a mover. ``num_blocks``: of this worker's pool."""

    def __init__(self, identity: ModelIdentity, endpoints: MoverEndpoints, num_blocks: int) -> None:
        self._identity, self._endpoints, self._num_blocks = identity, endpoints, num_blocks
        self.movers: dict[PeerId, str] = {}
        """By writer, the one in use."""
        self.pids: dict[PeerId, int] = {}
        self._retired: OrderedDict[PeerId, int] = (
            OrderedDict()
        )  # the newest incarnation, by worker id and process
        self._num_failed: dict[
            PeerId, int
        ] = {}  # movers that a writer has named as failed: they only become more

    def __contains__(self, peer: PeerId) -> bool:
        """Whether a mover was agreed on."""
        return peer in self.movers

    def meet(self, peer: PeerId, meet: Meet, worker: PeerId) -> Met:
        """The answer to Meet. ``worker``: this decode worker as it is called now. An echo is told that name
        and nothing else: what it came to would be taken for what the meeting that counts came to."""
        worker_id, incarnation = worker
        self.pids[peer] = meet.pid
        if self._is_echo(peer, meet, incarnation):
            return Met(worker_id=worker_id, incarnation=incarnation)
        ours = self._endpoints
        same_host = meet.host == ours.host
        able = [m for m in _movers_of(meet) if m in ours.movers and (same_host or m not in SAME_HOST_MOVERS)]
        common = [m for m in able if m not in meet.failed] or [FALLBACK_MOVER] * bool(meet.failed)
        if refused := _difference(self._identity, meet.model) or self._nothing_common(
            meet, common, same_host
        ):
            return Met(worker_id=worker_id, incarnation=incarnation, refused=refused)
        self._num_failed[peer] = len(meet.failed)
        self.movers[peer] = common[0]
        tcp = FALLBACK_MOVER if FALLBACK_MOVER in meet.movers else FORMER_NAME
        return Met(
            worker_id=worker_id,
            incarnation=incarnation,
            mover=tcp if common[0] == FALLBACK_MOVER else common[0],
            num_blocks=self._num_blocks,
            data_address=ours.data_address,
            shm_name=ours.shm_name,
        )

    def earlier_runs(self, peer: PeerId) -> list[PeerId]:
        """What the same process was called before: it has no put under way that it began under those
        names."""
        return [known for known in self.pids if known[0] == peer[0] and is_earlier(known[1], peer[1])]

    def retire(self, peer: PeerId, message: Retire) -> list[PeerId]:
        """Those that have ended so. An echo of what they once said does not bring them back."""
        ended, process = message.incarnation, (peer[0], message.incarnation >> COUNT_BITS)
        remember(self._retired, process, max(ended, self._retired.get(process, 0)))
        return [known for known in self.pids if known[0] == peer[0] and has_ended(known[1], ended)]

    def has_retired(self, peer: PeerId) -> bool:
        return peer[1] <= self._retired.get((peer[0], peer[1] >> COUNT_BITS), 0)

    def forget_choices(self) -> None:
        """What failed with this worker's earlier incarnation may be tried again."""
        self._num_failed.clear()

    def forget(self, peer: PeerId) -> None:
        """Its process has ended."""
        self.movers.pop(peer, None)
        self._num_failed.pop(peer, None)
        self.pids.pop(peer, None)

    def _is_echo(self, peer: PeerId, meet: Meet, incarnation: int) -> bool:
        """Said to an earlier incarnation of ours, or before a mover failed."""
        return meet.addressee not in (0, incarnation) or len(meet.failed) < self._num_failed.get(peer, 0)

    def _nothing_common(self, meet: Meet, common: list[str], same_host: bool) -> str:
        if common:
            return ""
        needs = "" if same_host else f" ({' and '.join(sorted(SAME_HOST_MOVERS))}: on the same host only)"
        ours = ", ".join(self._endpoints.movers)
        return f"no mover in common: prefill has {', '.join(_movers_of(meet))}; decode has {ours}{needs}"


def _movers_of(meet: Meet) -> list[str]:
    """By their present names, each once, best first."""
    return list(dict.fromkeys(FALLBACK_MOVER if mover == FORMER_NAME else mover for mover in meet.movers))


def _difference(ours: ModelIdentity, theirs: ModelIdentity) -> str:
    """A sentence naming the first field that differs; empty where none does."""
    for name in ModelIdentity.__struct_fields__:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"the workers' {name.replace('_', ' ')} differs: decode has {a!r}, prefill has {b!r}"
    return ""
