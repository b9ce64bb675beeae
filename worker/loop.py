"""A worker's process: one loop around the pure cores of the roles that it plays, {prefill}, {decode} or both.

wait            for sockets, the step thread or the clock
complete steps  what has run goes to the core; first tokens leave at once
receive         messages, KV blocks that arrived, compiled grammars, deadlines go to the core
launch          the core's next step goes to the step thread
carry out       what the core wants done: messages, puts, leases, checks of blocks
report          heartbeat and cache events
save            cached blocks go to the KV store

To the coordinator each role is a worker of its own, with a name of its own where the process may play both.

    decode ──Flip──> decode (drains) + prefill (takes work at once) ──Goodbye──> prefill
"""

from __future__ import annotations

import logging

from ..engine.cache.offload import Offload
from ..transport.handoff.sending_end import RetiringEnd
from ..transport.messages.messages import Role
from .live_roles import DecodeRole, PrefillRole
from .parts import WorkerParts
from .roles import RoleHost
from .settings import DecodeSettings, FlexibleSettings, PrefillSettings

_log = logging.getLogger(__name__)


class Worker:
    """One worker process. ``run`` returns after ``stop``, or when the last of its roles has ended."""

    def __init__(
        self, settings: PrefillSettings | DecodeSettings | FlexibleSettings, parts: WorkerParts
    ) -> None:
        self._settings, self._parts = settings, parts
        self.roles: dict[Role, PrefillRole | DecodeRole] = {}
        self._retiring: list[RetiringEnd] = []  # of roles that have ended
        self._stopped = self._ordered = False
        self._leaving = False  # the process ends with its last role, and begins none
        self.turned_at = 0.0  # seconds of the clock
        self._host: RoleHost | None = None
        self._offload = Offload(parts.blocks, parts.store.knows) if parts.store is not None else None
        if isinstance(settings, FlexibleSettings):
            self._host = RoleHost(
                settings.worker_id,
                parts.blocks,
                self.begin,
                parts.incarnations,
                parts.times.rest,
                mixed=len(settings.begins_as) == 2,
                home=settings.home,
                for_decode=self._num_growing_blocks,
            )
        for role in settings.begins_as:
            self.begin(role)

    def begin(self, role: str) -> bool:
        """Play this role from now on. False: not yet, for the last one of that role still leaves; or the
        process ends."""
        if self._leaving:
            return False
        if role in self.roles:
            return not self.roles[role].departure.has_begun
        began, settings = self._parts.clock.now(), self._settings
        if isinstance(settings, FlexibleSettings):
            settings = settings.in_role(role)
        if role == "prefill":
            assert isinstance(settings, PrefillSettings)
            self.roles["prefill"] = PrefillRole(settings, self._parts, self._host)
        else:
            assert isinstance(settings, DecodeSettings)
            self.roles["decode"] = DecodeRole(settings, self._parts, self._host)
        if self._leaving:  # ``leave`` came before it was there
            self._order_all()
        _log.info("begins as a %s worker, after %.1f ms", role, 1e3 * (self._parts.clock.now() - began))
        return True

    def stop(self) -> None:
        """Leave the loop. May be called from a signal handler or another thread."""
        self._stopped = True
        self._parts.wake()

    def leave(self) -> None:
        """Drain, then leave the loop; the second time, leave it at once. May be called from a signal
        handler."""
        self._stopped, self._ordered, self._leaving = self._ordered, True, True
        self._order_all()
        if self.roles:
            self._parts.wake()

    def _order_all(self) -> None:
        for role in list(self.roles.values()):
            role.departure.ordered = True

    @property
    def is_over(self) -> bool:
        """Whether the loop is to end."""
        return self._stopped or not self.roles

    @property
    def running_step(self) -> object | None:
        """The oldest step that runs. May be read from any thread."""
        return self._parts.steps.oldest

    @property
    def at_rest(self) -> bool:
        """Whether the roles keep nothing for anybody, and none has ended or is to end."""
        cores = (role.core for role in self.roles.values())
        return not self._retiring and all(core.at_rest and not core.drains for core in cores)

    def run(self) -> None:
        """Loop until the end."""
        try:
            while not self.is_over:
                ready = self._parts.wait(self.patience())
                self.turned_at = self._parts.clock.now()
                self.turn(ready, self.turned_at)
        finally:
            self.close()

    def turn(self, ready: set[object], now: float) -> None:
        """Do what there is to do. ``ready``: see ``Network.ready``."""
        roles, steps = list(self.roles.values()), self._parts.steps
        for role in roles:
            role.complete_steps(now)
        for role in roles:
            role.receive(ready, now)
        if steps.launch(now):
            for role in roles:
                role.complete_steps(now)
        for role in roles:
            role.carry_out(now)
        steps.launch(now)  # blocks that were just freed, or verified, are used at once
        for role in roles:
            role.report(now)
            if role.core.has_actions:  # what a step begins, or a dead writer ends, waits for no other turn
                role.carry_out(now)
            if role.has_ended(now):
                self.end(role.role)
        self._save_blocks()
        self._give_up_adapters()
        self._end_together(now)
        self._answer_late_peers(now)

    def end(self, name: Role) -> None:
        """Play this role no more: nothing is left of it here."""
        role = self.roles.pop(name)
        if self._leaving or not self.roles:
            _log.info("drained: nothing is left here, leaving")
            role.close()  # the process ends
        else:
            self._retiring.append(RetiringEnd(role.sending))
            role.stop()
            blocks = self._parts.blocks
            cached = f"{blocks.num_cached} of {blocks.num_blocks} KV blocks are cached"
            _log.info("is no %s worker any more: %s", name, cached)

    def close(self) -> None:
        """Release all but the model."""
        for end in (*self.roles.values(), *self._retiring):
            end.close()
        self.roles.clear()
        self._parts.close()

    def patience(self) -> float:
        """Return how many seconds the loop may wait."""
        return min(role.patience(self._parts.times.tick) for role in self.roles.values())

    def _end_together(self, now: float) -> None:
        """A mixed worker plays both roles or none."""
        host, roles = self._host, self.roles.values()
        if (
            host is not None
            and host.mixed
            and (len(roles) < 2 or any(role.departure.has_begun for role in roles))
        ):
            self._leaving = True
            for role in roles:
                role.departure.begin(now)

    def _save_blocks(self) -> None:
        """Write some cached blocks to the KV store, before they are evicted."""
        store, offload = self._parts.store, self._offload
        if store is None or offload is None or not store.takes_writes:
            return
        idle = not any(role.core.held for role in self.roles.values())
        hashes, blocks = offload.take(store.group, idle)
        if hashes:
            store.write(hashes, blocks)

    def _give_up_adapters(self) -> None:
        """Let go of adapters whose slots others need."""
        if (adapters := self._parts.adapters).lacks_slots:
            cores = [role.core for role in self.roles.values()]
            in_use = {content for core in cores for content in core.adapters.in_use}
            adapters.give_up(in_use, {content for core in cores for content in core.adapters.reported})

    def _answer_late_peers(self, now: float) -> None:
        """A role that has ended informs the workers that may hold blocks for it until they have answered."""
        for end in list(self._retiring):
            end.turn(now)
            if end.is_over:
                end.close()
                self._retiring.remove(end)

    def _num_growing_blocks(self) -> int:
        decode = self.roles.get("decode")
        return decode.core.room()[1] if isinstance(decode, DecodeRole) else 0
