"""Everything that a worker's process takes from outside. ``live_parts.py`` makes the live ones; the fault
simulator has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..decode.answers import KEPT_S
from ..engine.adapters.slots import AdapterSlots
from ..engine.cache.block_manager import BlockManager
from ..engine.step.constraint import CompileGrammar
from ..engine.step.grammar import CompilingCore
from ..transport.environment import Clock, Environment
from ..transport.handoff.layer_slicing import SlicingMode
from ..transport.handoff.protocol import HandoffTimes, Key
from ..transport.handoff.reachability import ReachTimes
from ..transport.handoff.receiving_end import CHECK_BYTES
from ..transport.messages.messages import ModelIdentity, Role
from ..transport.movers.targets import MoverTargets
from ..transport.process.reports import Telemetry
from ..transport.process.worker_trace import WorkerTrace
from .settings import DecodeSettings, PrefillSettings
from .steps import Steps


class Grammars(Protocol):
    """Compiles grammars while the loop goes on."""

    def submit(self, order: CompileGrammar) -> None: ...
    def report(self, core: CompilingCore) -> None: ...


class ReadingCore(Protocol):
    """``prefill.StoredPrefixes``, as far as it is given what has been read."""

    def arrived(self, key: Key, count: int) -> list[int]: ...
    def filled(self, key: Key, count: int) -> None: ...


class BlockStore(Telemetry, Protocol):
    """Reads and writes KV blocks outside the cache while the loop goes on, up to ``group`` at a time. For a
    prompt ``ahead`` groups are read at a time."""

    @property
    def group(self) -> int: ...
    @property
    def ahead(self) -> int: ...
    @property
    def takes_writes(self) -> bool: ...
    def knows(self, block_hash: bytes) -> bool: ...
    def write(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None: ...
    def read(self, key: Key, hashes: Sequence[bytes]) -> None: ...
    def report(self, core: ReadingCore) -> None: ...


@dataclass(frozen=True, slots=True)
class RoleParts:
    """The parts of one role. ``stop`` releases all but the environment."""

    environment: Environment
    movers: tuple[str, ...]  # by which blocks leave, the best first
    grammars: Grammars
    stop: Callable[[], None]
    targets: MoverTargets  # by which blocks arrive
    advertised_host: str  # where others find what listens here
    trace: WorkerTrace | None = None
    gpu: str = ""  # UUID of the one with the KV cache; empty: host memory


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
    vocabulary: str = ""  # its tokenizer's, by name
    size: str = ""  # in words
    start_phases: Mapping[str, float] = field(default_factory=dict)  # seconds of its start, by name
    takes_images: bool = False  # in prompts
    draft_cost: float = 0.0  # of a token that it drafts, as a share of a step's time; 0: it drafts none


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """The patience of a worker's loop, in seconds, where no setting gives another."""

    tick: float = 0.05  # between two looks at deadlines
    rest: float = 1.0  # before a role at rest ends: a lease of a peer may wait for its last message
    answers: float = KEPT_S  # for which one is kept for its client
    handoff: HandoffTimes = field(default_factory=HandoffTimes)
    reach: ReachTimes = field(default_factory=ReachTimes)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of one process. ``wake`` ends ``wait``, and may be called from any thread."""

    clock: Clock
    model: ModelFacts
    blocks: BlockManager  # all roles use the same
    pid: int
    incarnations: Callable[[], int]  # returns the number of the next incarnation of any role
    secret: Callable[[], bytes]  # returns the secret of a lease, SECRET_BYTES long
    open: Callable[[PrefillSettings | DecodeSettings, Role], RoleParts]  # of a role that begins
    steps: Steps  # of all roles, around the device that computes them
    wait: Callable[[float], set[object]]  # at most these seconds; returns what ``Network.ready`` does
    wake: Callable[[], None]
    close: Callable[[], None]  # releases all but the model
    telemetry: Telemetry | None = None  # of the device
    store: BlockStore | None = None
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    discover: Callable[[], Sequence[str]] = tuple  # returns coordinators that are found by name
    times: WorkerTimes = field(default_factory=WorkerTimes)
    slicing: SlicingMode = "auto"
    check_bytes: int = CHECK_BYTES  # of KV blocks, verified in one turn of a role, or sent of a prefix
