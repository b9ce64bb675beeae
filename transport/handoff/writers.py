"""The prefill workers that a decode worker has met, and the mover that each of them writes by. Pure."""

from __future__ import annotations

from collections import OrderedDict

from ..messages.fields import COUNT_BITS, has_ended
from ..messages.messages import Meet, Met, ModelIdentity, PeerId
from ..movers.interface import FALLBACK_MOVER, SAME_HOST_MOVERS, TWO_GPU_MOVERS, MoverEndpoints
from .protocol import remember


class Writers:
    """Agrees with each prefill worker on a mover. ``num_blocks``: of this worker's pool."""

    def __init__(self, identity: ModelIdentity, endpoints: MoverEndpoints, num_blocks: int) -> None:
        self._identity, self._endpoints, self._num_blocks = identity, endpoints, num_blocks
        self.movers: dict[PeerId, str] = {}  # the one in use, by writer
        self.pids: dict[PeerId, int] = {}
        # newest incarnation, by worker id and process
        self._retired: OrderedDict[PeerId, int] = OrderedDict()
        self._num_failed: dict[PeerId, int] = {}  # movers that a writer has named as failed; only grows

    def meet(self, peer: PeerId, meet: Meet, worker: PeerId) -> Met:
        """Return the answer to Meet. ``worker``: this decode worker's present name. The answer to an echo
        contains that name and nothing else, so that it cannot be taken for the answer to the newest Meet."""
        worker_id, incarnation = worker
        self.pids[peer] = meet.pid
        if self._is_echo(peer, meet, incarnation):
            return Met(worker_id=worker_id, incarnation=incarnation)
        ours = self._endpoints
        same_host = meet.host == ours.host
        able = [m for m in meet.movers if m in ours.movers and (same_host or m not in SAME_HOST_MOVERS)]
        if meet.gpu and meet.gpu == ours.gpu:  # NCCL connects no two processes on one GPU
            able = [mover for mover in able if mover not in TWO_GPU_MOVERS]
        common = [m for m in able if m not in meet.failed] or [FALLBACK_MOVER] * bool(meet.failed)
        refused = _difference(self._identity, meet.model)
        if refused or not common:
            refused = refused or self._nothing_common(meet, same_host)
            return Met(worker_id=worker_id, incarnation=incarnation, refused=refused)
        self._num_failed[peer] = len(meet.failed)
        self.movers[peer] = common[0]
        return Met(
            worker_id=worker_id,
            incarnation=incarnation,
            mover=common[0],
            num_blocks=self._num_blocks,
            data_address=ours.data_address,
            shm_name=ours.shm_name,
        )

    def retire(self, peer: PeerId, ended: int) -> list[PeerId]:
        """Return the names that are over with this incarnation: no put that was begun under them is under
        way. Echoes of their messages do not bring them back."""
        process = (peer[0], ended >> COUNT_BITS)
        remember(self._retired, process, max(ended, self._retired.get(process, 0)))
        return [known for known in self.pids if known[0] == peer[0] and has_ended(known[1], ended)]

    def has_retired(self, peer: PeerId) -> bool:
        return peer[1] <= self._retired.get((peer[0], peer[1] >> COUNT_BITS), 0)

    def forget_choices(self) -> None:
        """Allow movers again that failed with this worker's earlier incarnation."""
        self._num_failed.clear()

    def forget(self, peer: PeerId) -> None:
        """Forget this writer: its process or its name has ended."""
        self.movers.pop(peer, None)
        self._num_failed.pop(peer, None)
        self.pids.pop(peer, None)

    def _is_echo(self, peer: PeerId, meet: Meet, incarnation: int) -> bool:
        """Whether Meet was sent to an earlier incarnation of ours, or before a mover failed."""
        return meet.addressee not in (0, incarnation) or len(meet.failed) < self._num_failed.get(peer, 0)

    def _nothing_common(self, meet: Meet, same_host: bool) -> str:
        needs = "" if same_host else f" ({' and '.join(sorted(SAME_HOST_MOVERS))}: on the same host only)"
        if meet.gpu and meet.gpu == self._endpoints.gpu:
            needs += f" ({' and '.join(sorted(TWO_GPU_MOVERS))}: between two GPUs only; these share one)"
        ours = ", ".join(self._endpoints.movers)
        return f"no mover in common: prefill has {', '.join(meet.movers)}; decode has {ours}{needs}"


def _difference(ours: ModelIdentity, theirs: ModelIdentity) -> str:
    """Return a sentence that names the first field that differs; empty if KV blocks fit."""
    if (found := ours.difference(theirs)) is None:
        return ""
    name, a, b = found
    return f"the workers' {name} differs: decode has {a}, prefill has {b}"
