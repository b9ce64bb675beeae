"""The live dispatcher: workers connect to its control socket, and it runs on an event loop."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict

from ..transport.channels.channels import RouterChannel
from ..transport.channels.event_loop import Attachment, LoopTimers, attach
from ..transport.channels.keys import ClusterKey
from ..transport.messages.messages import FROM_WORKER
from .dispatcher import LifecycleDispatcher
from .lifecycle.lifecycle import Lifecycle
from .listeners import ListenerFailures
from .metrics.system_snapshot import SystemSnapshot
from .process_watch import ProcessWatch
from .system_view import debug_state, is_ready, system_snapshot


class SocketDispatcher(LifecycleDispatcher):
    """Made, started, called and stopped on one event loop."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        control_address: str,
        key: ClusterKey | None,
        failures: ListenerFailures | None = None,
    ) -> None:
        """Bind the control socket. Raises AddressError."""
        self._loop = asyncio.get_running_loop()
        self._channel = RouterChannel.bind(control_address, key, FROM_WORKER)
        self._channel.watch_connections()
        self.address = self._channel.address
        self._watch = ProcessWatch(self.process_ended)
        self._attachment: Attachment | None = None
        super().__init__(lifecycle, LoopTimers(self._loop), self._channel, self._watch, failures)

    def start(self) -> None:
        """Begin to receive from the workers."""
        self._attachment = attach(self._loop, self._channel, self.receive)
        super().start()

    def stop(self) -> None:
        """Close the socket. Workers notice, and reconnect when there is a coordinator again."""
        if self._attachment is not None:
            self._attachment.close()
        super().stop()
        self._watch.close()
        self._channel.close()

    def change_key(self, key: ClusterKey) -> None:
        """Change the cluster's key; see ``RouterChannel.change_key``."""
        self._channel.change_key(key)

    def ready(self) -> bool:
        return is_ready(self._core)

    def failing(self) -> str:
        return self._core.outcomes.failing

    def gap(self) -> str:
        return self._core.gap(self._timers.now())

    def flips(self) -> list[dict[str, object]]:
        """Return the latest changes of role, JSON-ready."""
        now = self._timers.now()
        return [record.as_json(now) for record in self._core.flips.latest]

    def snapshot(self) -> dict[str, object]:
        """Return the state for /debug/state, JSON-ready."""
        return {
            "coordinator": {
                "pid": os.getpid(),
                "incarnation": self._core.incarnation,
                "control_address": self.address,
                "ready": self.ready(),
            },
            "channel": asdict(self._channel.counters),
            **debug_state(self._core, self._timers.now()),
        }

    def system(self) -> SystemSnapshot:
        """Return the state for /metrics and the dashboard."""
        return system_snapshot(self._core)
