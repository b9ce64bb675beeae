"""A lifecycle whose workers, played by the test, report adapters."""

from __future__ import annotations

from typing import Any

from splitserve.coordinator.lifecycle.actions import Action, Send
from splitserve.coordinator.lifecycle.adapters import AdapterNames
from splitserve.transport.messages.messages import Adapter, BlockEvents, Prefill

from .lifecycle_bench import Bench


class Adapted(Bench):
    """Prefill workers p, p2 and decode workers d, d2, which report adapters as ``name:content``."""

    def __init__(self, *more: str, **limits: Any) -> None:
        super().__init__(**{"dead_after_s": 1e9, "max_queue": 10_000, **limits})
        self.numbers = dict.fromkeys(("p", "d", "p2", "d2"), 0)
        for name, role in (("p2", "prefill"), ("d2", "decode")):
            self.hello(name, role)
        for name in self.numbers:
            self.report(name, *more)

    def report(self, worker: str, *adapters: str, incarnation: int = 1) -> list[Action]:
        """All adapters of a worker; None of an Adapter's name: ``:content``."""
        named = tuple(Adapter(name=name, content=content) for name, content in map(_parts, adapters))
        return self.send_events(worker, incarnation, adapters=named)

    def send_events(self, worker: str, incarnation: int = 1, **more: Any) -> list[Action]:
        number = self.numbers[worker] = self.numbers.get(worker, 0) + 1
        more = {"reset": number == 1, **more}
        events = BlockEvents(worker_id=worker, incarnation=incarnation, number=number, **more)
        return self.send(worker, events, incarnation) + self.core.tick(self.now)

    def ask(self, name: str, adapter: str = "", **more: Any) -> list[Action]:
        shown = f"the-{adapter}" if adapter else ""
        return self.submit(name, adapter=adapter, adapter_name=shown, deadline=1e9, **more)

    def die(self, name: str) -> list[Action]:
        return self.core.process_ended((name, 1), self.now)

    @property
    def names(self) -> AdapterNames:
        return self.core.pools.adapters.names()


def _parts(adapter: str) -> tuple[str, str]:
    name, _, content = adapter.partition(":")
    return name, content


def routes(actions: list[Action]) -> list[tuple[str, str, str]]:
    """Return the request, the prefill and the decode worker of each prompt among these."""
    return [
        (a.message.spec.request_id, a.worker[0], a.message.decode.worker_id)
        for a in actions
        if isinstance(a, Send) and isinstance(a.message, Prefill)
    ]


def where(bench: Adapted, adapter: str = "") -> set[tuple[str, str]]:
    """Return the pairs that 16 requests go to, one after the other."""
    found = set()
    for n in range(16):
        found |= {route[1:] for route in routes(bench.ask(f"w{n}", adapter))}
        bench.core.cancel(f"w{n}", bench.now)
    return found
