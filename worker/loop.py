"""A worker's process: one loop around the pure cores of the roles that it plays, {prefill}, {decode} or both.

wait            for sockets, the step thread or the clock
complete steps  what has run goes to the core; first tokens leave at once
receive         messages, KV blocks that arrived, compiled grammars, deadlines go to the core
launch          the core's next step goes to the step thread
carry out       what the core wants done: messages, puts, leases, checks of blocks
report          heartbeat and cache events

To the coordinator each role is a worker of its own, with a name of its own where the process may play both.

    decode ──Flip──> decode (drains) + prefill (takes work at once) ──Goodbye──> prefill
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import zmq

from ..engine.cache.block_manager import BlockManager
from ..engine.load_model import load_model
from ..engine.worker_model import WorkerModel
from ..transport.channels.host import allow_many_files
from ..transport.channels.incarnation import incarnations
from ..transport.channels.keys import ClusterKey, load_key
from ..transport.channels.wakeup import Wakeup
from ..transport.handoff.retiring_end import RetiringEnd
from ..transport.messages.messages import Role
from ..transport.movers.shm import SharedPool
from ..transport.process.collector import settle_heap
from .decode_role import DecodeRole
from .gpu_telemetry import telemetry_of
from .played_role import TICK_S, Process
from .prefill_role import PrefillRole
from .roles import RoleHost
from .settings import DecodeSettings, FlexibleSettings, PrefillSettings
from .turns import RunnerInTurns

SWITCH_S = 1e-4  # step threads and the loop alternate: the default of 5 ms would show in every token
_log = logging.getLogger(__name__)


class Worker:
    """One worker process. ``run`` returns after ``stop``, or when the last of its roles has ended."""

    def __init__(
        self,
        settings: PrefillSettings | DecodeSettings | FlexibleSettings,
        model: WorkerModel,
        key: ClusterKey | None,
        shared: SharedPool | None = None,
    ) -> None:
        """``shared``: the pool's memory, where other processes of this host may map it."""
        self._settings = settings
        self.roles: dict[Role, PrefillRole | DecodeRole] = {}
        self._retiring: list[RetiringEnd] = []  # of roles that have ended
        self._stopped = self._leaving = False
        self._wakeup = Wakeup()
        self._telemetry = telemetry_of(model.device)
        blocks, numbers, host = BlockManager(len(model.pool)), incarnations(), None
        if isinstance(settings, FlexibleSettings):
            turns = RunnerInTurns(model.runner, model.launch)
            model = replace(model, runner=turns, launch=turns.launch if model.launch is not None else None)
            mixed = settings.start_as == "mixed"
            host = RoleHost(
                settings.worker_id,
                blocks,
                self.begin,
                numbers,
                mixed=mixed,
                for_decode=self._num_growing_blocks,
            )
        self._process = Process(model, key, shared, blocks, numbers, self._telemetry, self._wakeup.set, host)
        for role in settings.begins_as:
            self.begin(role)

    def begin(self, role: str) -> bool:
        """Play this role from now on. False: not yet, for the last one of that role still leaves; or the
        process ends."""
        if self._leaving:
            return False
        if role in self.roles:
            return not self.roles[role].departure.has_begun
        began, settings = time.monotonic(), self._settings
        if isinstance(settings, FlexibleSettings):
            settings = settings.in_role(role)
        if role == "prefill":
            assert isinstance(settings, PrefillSettings)
            self.roles["prefill"] = PrefillRole(settings, self._process)
        else:
            assert isinstance(settings, DecodeSettings)
            self.roles["decode"] = DecodeRole(settings, self._process)
        _log.info("begins as a %s worker, after %.1f ms", role, 1e3 * (time.monotonic() - began))
        return True

    def stop(self) -> None:
        """Leave the loop. May be called from a signal handler or another thread."""
        self._stopped = True
        self._wakeup.set()

    def leave(self) -> None:
        """Drain, then leave the loop; the second time, leave it at once. May be called from a signal
        handler."""
        self._stopped, self._leaving = self._leaving, True
        for role in list(self.roles.values()):
            role.departure.ordered = True
        if self.roles:
            self._wakeup.set()

    def run(self) -> None:
        """Loop until the end."""
        allow_many_files()
        sys.setswitchinterval(SWITCH_S)
        settle_heap()
        try:
            while self.roles and not self._stopped:
                self.turn()
        finally:
            self.close()

    def turn(self, patience_s: float = TICK_S) -> None:
        """Wait for something to do, at most ``patience_s`` seconds, and do it."""
        ready, now = self._wait(patience_s), time.monotonic()
        for name, role in list(self.roles.items()):
            role.complete_steps(now)
            role.receive(ready, now)
            role.launch(now)
            role.carry_out(now)
            role.steps.launch(now)  # blocks that were just freed, or verified, are used at once
            role.report(now)
            if role.has_ended(now):
                self.end(name)
        self._end_together(now)
        self._answer_late_peers(now)

    def end(self, name: Role) -> None:
        """Play this role no more: nothing is left of it here."""
        role = self.roles.pop(name)
        if self._leaving or not self.roles:
            _log.info("drained: nothing is left here, leaving")
            role.close()  # the process ends, which says it all
        else:
            self._retiring.append(RetiringEnd(role.sending, role.sender))
            role.stop()
            cached = self._process.blocks.num_cached
            _log.info(
                "is no %s worker any more: %d of %d KV blocks are cached",
                name,
                cached,
                self._process.blocks.num_blocks,
            )

    def close(self) -> None:
        """Release all but the model."""
        for end in (*self.roles.values(), *self._retiring):
            end.close()
        self.roles.clear()
        if self._telemetry is not None:
            self._telemetry.stop()
        self._wakeup.close()

    def _wait(self, patience_s: float) -> set[object]:
        """Return the sockets with something to read."""
        polled: list[tuple[Any, int]] = [(self._wakeup.fd, zmq.POLLIN)]
        for role in self.roles.values():
            polled += role.poller.sockets
            patience_s = role.patience(patience_s)
        ready: set[object] = {socket for socket, _ in zmq.zmq_poll(polled, int(patience_s * 1000))}
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        return ready

    def _end_together(self, now: float) -> None:
        """A mixed worker plays both roles or none."""
        host, roles = self._process.host, self.roles.values()
        if (
            host is not None
            and host.mixed
            and (len(roles) < 2 or any(role.departure.has_begun for role in roles))
        ):
            for role in roles:
                role.departure.begin(now)

    def _answer_late_peers(self, now: float) -> None:
        """A role that has ended tells the workers that may hold blocks for it until they have answered."""
        for end in list(self._retiring):
            end.turn(now)
            if end.is_over:
                end.close()
                self._retiring.remove(end)

    def _num_growing_blocks(self) -> int:
        decode = self.roles.get("decode")
        return decode.core.room()[1] if isinstance(decode, DecodeRole) else 0


def run(settings: PrefillSettings | DecodeSettings | FlexibleSettings) -> None:
    """Run the process until SIGTERM or Ctrl-C."""
    key = None if settings.insecure or settings.key_file is None else load_key(settings.key_file)
    shared: list[SharedPool] = []

    def allocate(num_bytes: int) -> memoryview:
        shared.append(SharedPool.create(num_bytes))
        return shared[0].buffer

    settings = settings.model_copy(update={"name": settings.worker_id})
    decodes = isinstance(settings, DecodeSettings)
    model = load_model(
        settings,
        allocate if decodes and settings.mover in ("auto", "shm") else None,
        settings.max_num_seqs if decodes else 0,
        settings.chunk_budget if isinstance(settings, PrefillSettings) else None,
    )
    worker = Worker(settings, model, key, shared[0] if shared else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.leave())
    worker.run()
