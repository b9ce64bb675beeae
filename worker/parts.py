"""Everything that a worker's process takes from outside. ``live_parts.py`` has the live implementation; the
fault simulator has its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..decode.core import DecodeCore
from ..engine.cache.block_manager import BlockManager
from ..engine.sampling.constraint import CompileGrammar
from ..engine.sampling.grammar_thread import CompilingCore
from ..prefill.core import PrefillCore
from ..transport.environment import Clock, Environment
from ..transport.handoff.protocol import HandoffTimes
from ..transport.handoff.reachability import ReachTimes
from ..transport.messages.messages import ModelIdentity
from ..transport.movers.targets import MoverTargets
from ..transport.process.reports import Telemetry
from ..transport.process.worker_trace import WorkerTrace
from .settings import DecodeSettings, PrefillSettings
from .steps import DecodeSteps, PrefillSteps


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """The patience of a worker's loop, in seconds, where no setting says otherwise."""

    tick: float = 0.05  # between two looks at deadlines
    rest: float = 1.0  # before a role at rest ends: a lease of a peer may wait for its last message
    handoff: HandoffTimes = field(default_factory=HandoffTimes)
    reach: ReachTimes = field(default_factory=ReachTimes)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a worker's loop knows of its model."""

    identity: ModelIdentity
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    num_layers: int
    device_type: str = "cpu"
    device_uuid: str = ""
    start_phases: Mapping[str, float] = field(default_factory=dict)  # seconds of its start, by name


class Grammars(Protocol):
    """Compiles grammars while the loop goes on."""

    def submit(self, order: CompileGrammar) -> None: ...

    def report(self, core: CompilingCore) -> None:
        """Report to the core what has been compiled since the last call."""


class RoleParts(Protocol):
    """What one role takes from outside."""

    @property
    def environment(self) -> Environment: ...

    @property
    def movers(self) -> tuple[str, ...]:
        """Movers by which blocks can leave, the best first."""

    @property
    def targets(self) -> MoverTargets:
        """Movers by which blocks arrive. Only a decode role asks."""

    @property
    def advertised_host(self) -> str:
        """Host under which other workers find what listens here. Only a decode role asks."""

    @property
    def grammars(self) -> Grammars: ...

    @property
    def trace(self) -> WorkerTrace | None: ...

    def stop(self) -> None:
        """Release all but the environment."""


class WorkerParts(Protocol):
    """What one worker's process takes from outside."""

    @property
    def clock(self) -> Clock: ...

    @property
    def times(self) -> WorkerTimes: ...

    @property
    def model(self) -> ModelFacts: ...

    @property
    def blocks(self) -> BlockManager:
        """Owner of the KV blocks that all roles use."""

    @property
    def pid(self) -> int: ...

    @property
    def telemetry(self) -> Telemetry | None:
        """Readings of the device, for heartbeats."""

    @property
    def check_bytes(self) -> int:
        """Bytes of KV blocks that a decode role verifies in one turn."""

    def incarnation(self) -> int:
        """Return the number of the next incarnation of any role."""

    def secret(self) -> bytes:
        """Return the random secret of a lease, SECRET_BYTES long."""

    def open(self, settings: PrefillSettings | DecodeSettings, role: str) -> RoleParts:
        """Return the parts of a role that begins. Raises TransportError."""

    def decode_steps(self, core: DecodeCore) -> DecodeSteps: ...

    def prefill_steps(self, core: PrefillCore) -> PrefillSteps: ...

    def wait(self, patience_s: float) -> set[object]:
        """Wait until there is something to do; return what can be received from (see ``Network.ready``)."""

    def wake(self) -> None:
        """End ``wait``, now or the next one. May be called from a signal handler or another thread."""

    def close(self) -> None:
        """Release all but the model."""
