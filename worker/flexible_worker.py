"""A worker that changes its role in place: one process, one model, one KV cache; a prefill worker, a decode worker, or for a moment both.
Or for good both: a mixed worker, which hands what it computes to itself.

    decode ──Flip──> decode (drains: hands over or finishes) + prefill (takes work at once) ──Goodbye──> prefill

To the coordinator the two are workers of their own, with names of their own, that share a process. Each is the same loop around the same
core as in a process that has but one role; here one thread takes turns around them.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from dataclasses import replace

import zmq

from ..decode.worker import SWITCH_S, DecodeWorker
from ..engine.cache.block_manager import BlockManager
from ..engine.load_model import load_model
from ..engine.worker_model import WorkerModel
from ..prefill.worker import TICK_S, PrefillWorker
from ..transport.channels.host import allow_many_files
from ..transport.channels.incarnation import incarnations
from ..transport.channels.keys import ClusterKey, load_key
from ..transport.handoff.retiring_end import RetiringEnd
from ..transport.movers.shm import SharedPool
from ..transport.process.collector import settle_heap
from .flexible_settings import FlexibleSettings
from .role_host import RoleHost
from .runner_in_turns import RunnerInTurns

_log = logging.getLogger(__name__)


class FlexibleWorker:
    """``run`` returns when the last of its roles has ended."""

    def __init__(self, settings: FlexibleSettings, model: WorkerModel, key: ClusterKey | None, shared: SharedPool | None) -> None:
        turns = RunnerInTurns(model.runner, model.launch)
        self._settings, self._key, self._shared = settings, key, shared
        self._model = replace(model, runner=turns, launch=turns.launch if model.launch is not None else None)
        mixed = settings.start_as == "mixed"
        blocks = BlockManager(len(model.pool))
        self._host = RoleHost(settings.worker_id, blocks, self.begin, incarnations(), mixed=mixed, for_decode=self._num_growing_blocks)
        self._workers: dict[str, PrefillWorker | DecodeWorker] = {}
        self._retiring: list[RetiringEnd] = []  # of roles that are over
        self._leaving = False
        for role in ("decode", "prefill") if mixed else (settings.start_as,):
            self.begin(role)

    def begin(self, role: str) -> bool:
        """Is of this role from now on. False: it has not quite ended being so, and cannot begin again yet, or the process
        is to end; who wants it says so again."""
        if self._leaving:
            return False
        if role in self._workers:
            return not self._workers[role].drains
        began, settings = time.monotonic(), self._settings.in_role(role)
        if role == "prefill":
            self._workers[role] = PrefillWorker(settings, self._model, self._key, self._host)
        else:
            self._workers[role] = DecodeWorker(settings, self._model, self._key, self._shared, self._host)
        _log.info("begins as a %s worker, after %.1f ms", role, 1e3 * (time.monotonic() - began))
        return True

    def leave(self) -> None:
        """From a signal handler: drain, then end; said again, end at once."""
        self._leaving = True
        for worker in list(self._workers.values()):
            worker.leave()

    def run(self) -> None:
        """The loop."""
        allow_many_files()
        sys.setswitchinterval(SWITCH_S)
        settle_heap()
        try:
            while self._workers:
                self._wait()
                if self._host.mixed and any(worker.drains for worker in self._workers.values()):
                    for worker in self._workers.values():
                        worker.drain()  # of both roles or of none
                for role, worker in list(self._workers.items()):
                    worker.turn(0.0)
                    if worker.stopped:
                        self._end(role)
                self._retire(time.monotonic())
        finally:
            for worker in self._workers.values():
                worker.close()
            for end in self._retiring:
                end.close()

    def _wait(self) -> None:
        """Until there is something to do for any role."""
        workers = self._workers.values()
        patience_s = min(worker.patience(TICK_S) for worker in workers)
        zmq.zmq_poll([socket for worker in workers for socket in worker.sockets], int(patience_s * 1000))

    def _num_growing_blocks(self) -> int:
        decode = self._workers.get("decode")
        return decode.num_growing_blocks if isinstance(decode, DecodeWorker) else 0

    def _end(self, role: str) -> None:
        worker = self._workers.pop(role)
        if self._leaving or not self._workers:
            worker.close()  # the process ends, which says it all
        else:
            self._retiring.append(worker.retire())
            _log.info("is no %s worker any more: %d of %d KV blocks are cached", role, self._host.blocks.num_cached, len(self._model.pool))

    def _retire(self, now: float) -> None:
        for end in list(self._retiring):
            end.turn(now)
            if end.is_over:
                end.close()
                self._retiring.remove(end)


def run(settings: FlexibleSettings) -> None:
    """The process: until SIGTERM or Ctrl-C."""
    key = None if settings.insecure or settings.key_file is None else load_key(settings.key_file)
    shared: list[SharedPool] = []

    def allocate(num_bytes: int) -> memoryview:
        shared.append(SharedPool.create(num_bytes))
        return shared[0].buffer

    settings = settings.model_copy(update={"name": settings.worker_id})
    shm = settings.mover in ("auto", "shm")
    model = load_model(settings, allocate if shm else None, settings.max_num_seqs, settings.chunk_budget)
    worker = FlexibleWorker(settings, model, key, shared[0] if shared else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.leave())
    worker.run()
