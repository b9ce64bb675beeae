"""The latency profile of a worker, as ``splitserve profile`` writes it. Free of torch.

The simulator, the pool controller and paced runners read it.

    seconds of a step = curve(units) + read_s * reads + seq_s * seqs + cached_s * cached

              units                      reads                                       cached
    prefill   new tokens of all chunks   pairs of a new token and one it attends to  tokens before the chunks
    decode    sequences                  tokens in all their KV caches               0

The curve is linear between its points and goes on as its last piece beyond them. A model may consist of
several pieces by units (other kernels, other regimes). A chunk of ``n`` new tokens after ``c`` cached ones
attends to ``n * c + n * (n + 1) / 2`` pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .analytic.content import content_of
from .errors import EngineError
from .settings import KVDType, Quantization

SHIPPED = Path(__file__).resolve().parent / "profiles"
"""Profiles that come with splitserve; asked for by their name without `.json`."""
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Slowdown = Annotated[float, Field(ge=1, le=100)]
StepRole = Literal["prefill", "decode"]
Range = Annotated[tuple[float, float], Field(strict=False)]
PACED = "paced:"
"""What the ``runner`` of a worker begins with that takes a profile's time."""


class ProfileError(EngineError):
    """A profile cannot be read or used."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Residuals(_Part):
    """How well the fit meets its points: relative errors."""

    num_points: int
    mean: float
    p95: float
    worst: float


class Piece(_Part):
    """Holds below ``below`` units; None: for all that are left. ``curve``: (units, seconds), by units."""

    below: float | None = None
    curve: Annotated[tuple[tuple[float, float], ...], Field(min_length=1)]
    read_s: float = 0.0
    seq_s: float = 0.0
    cached_s: float = 0.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        units = [x for x, _ in self.curve]
        if any(a >= b for a, b in pairwise(units)):
            raise ValueError("the points of a curve must stand in the order of their units, each once")
        return self

    def seconds(self, units: float, reads: float, seqs: float, cached: float = 0.0) -> float:
        return self.at(units) + self.read_s * reads + self.seq_s * seqs + self.cached_s * cached

    def times(self, factor: float) -> Piece:
        """Multiply every time by ``factor``."""
        curve = tuple((units, factor * seconds) for units, seconds in self.curve)
        costs = {
            "read_s": factor * self.read_s,
            "seq_s": factor * self.seq_s,
            "cached_s": factor * self.cached_s,
        }
        return self.model_copy(update={"curve": curve, **costs})

    def at(self, units: float) -> float:
        """The curve's value."""
        curve = self.curve
        if len(curve) == 1:
            return curve[0][1]
        i = min(max(bisect_right(curve, (units, inf)), 1), len(curve) - 1)
        (x0, y0), (x1, y1) = curve[i - 1], curve[i]
        return (y1 - y0) / (x1 - x0) * (units - x0) + y0


class StepModel(_Part):
    """``ranges``: of the measured steps' units, reads, seqs and cached; what lies outside is extrapolated."""

    pieces: Annotated[tuple[Piece, ...], Field(min_length=1)]
    ranges: dict[Literal["units", "reads", "seqs", "cached"], Range] = {}
    residuals: Residuals | None = None
    held_out: Residuals | None = None  # at steps that were measured and not fitted to

    def seconds(self, units: float, reads: float, seqs: float, cached: float = 0.0) -> float:
        """Seconds of one step; never negative."""
        return max(0.0, self.piece(units).seconds(units, reads, seqs, cached))

    def piece(self, units: float) -> Piece:
        """The piece that holds for this number of units."""
        return next(
            (piece for piece in self.pieces if piece.below is None or units < piece.below), self.pieces[-1]
        )

    @property
    def base_s(self) -> float:
        """Seconds of the smallest step."""
        return max(0.0, self.pieces[0].curve[0][1])

    @property
    def mean_error(self) -> float | None:
        """By how much of itself a step is off on average: of those that were not fitted to, where there are
        any. None: not known."""
        known = self.held_out or self.residuals
        return known.mean if known is not None else None

    def times(self, factor: float) -> StepModel:
        """A model of steps that take ``factor`` times as long."""
        pieces = tuple(piece.times(factor) for piece in self.pieces)
        return self.model_copy(update={"pieces": pieces})

    def outside(self, units: float, reads: float, seqs: float, cached: float = 0.0) -> str:
        """Which quantity is less or more than was measured; empty where none is."""
        for name, value in (("units", units), ("reads", reads), ("seqs", seqs), ("cached", cached)):
            low_high = self.ranges.get(name)  # type: ignore[call-overload]
            if low_high is not None and not low_high[0] <= value <= low_high[1]:
                return name
        return ""


class HandoffModel(_Part):
    """A put of blocks takes ``put_s``, and then ``bytes_per_s``; where it is of some of the layers only,
    ``slice_s`` more for each block, whose piece lies by itself. A message is ``message_s`` on its way;
    checking is done at ``check_bytes_per_s``, and ``join_s`` passes between the last put and the join beside
    all that."""

    put_s: Seconds = 2e-4
    slice_s: Seconds = 0.0
    bytes_per_s: Annotated[float, Field(gt=0)] = 1e9
    message_s: Seconds = 2e-4
    check_bytes_per_s: Annotated[float, Field(gt=0)] = 8e9
    join_s: Seconds = 0.0
    residuals: Residuals | None = None

    def seconds(self, num_bytes: float, num_slices: int = 0, bytes_per_s: float | None = None) -> float:
        """Seconds of one put.

        ``num_slices``: number of blocks of which it moves some layers only; ``bytes_per_s``: rate of a slower
        link."""
        return self.put_s + num_slices * self.slice_s + num_bytes / (bytes_per_s or self.bytes_per_s)


class Memory(_Part):
    """The KV cache of one worker."""

    block_size: Annotated[int, Field(ge=1, le=4096)]  # tokens
    num_blocks: Annotated[int, Field(ge=2, le=1 << 24)]
    block_bytes: Annotated[int, Field(ge=1)]
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    max_model_len: Annotated[int, Field(ge=2, le=1 << 20)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits: a worker lowers ``max_model_len`` to this."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Numerics(_Part):
    """What the measured steps computed in, by the workers' options of these names; ``dtype`` as it was chosen
    where that was auto."""

    dtype: Literal["float32", "bfloat16", "float16"]
    kv_dtype: KVDType = "auto"
    quantization: Quantization = "none"
    exact: bool = False


class Power(_Part):
    """Watts of one worker: idle, in prefill steps, in decode steps."""

    idle_w: Annotated[float, Field(ge=0)]
    prefill_w: Annotated[float, Field(ge=0)]
    decode_w: Annotated[float, Field(ge=0)]

    def joules(self, seconds: float, prefill_s: float, decode_s: float) -> float:
        """Return the energy in ``seconds`` of all workers together, some of them in steps."""
        idle_s = max(0.0, seconds - prefill_s - decode_s)
        return prefill_s * self.prefill_w + decode_s * self.decode_w + idle_s * self.idle_w


class Contention(_Part):
    """How many times as long a step takes while *one* other worker of the same host computes.

    Cores share memory bandwidth, caches and the power budget that sets their clock.
    ``decode_beside_prefill``: a decode step while another worker computes prompts.

    ``splitserve profile`` measures it on CPUs: the same steps in turn beside an idle and a busy neighbour,
    each a process with its own cores, in processor time. Several neighbours are extrapolated: their
    effects are added up. Workers whose profiles lack this part neither slow others nor are slowed."""

    version: Literal[1] = 1
    prefill_beside_prefill: Slowdown = 1.0
    prefill_beside_decode: Slowdown = 1.0
    decode_beside_prefill: Slowdown = 1.0
    decode_beside_decode: Slowdown = 1.0
    ranges: dict[str, Range] = {}  # of each of these: the least and the most by the shape of the step

    def slowdown(self, role: StepRole, num_prefill: int, num_decode: int) -> float:
        """The slowdown of a step of this role beside ``num_prefill`` prefill and ``num_decode`` decode
        workers."""
        if role == "prefill":
            by_prefill, by_decode = self.prefill_beside_prefill, self.prefill_beside_decode
        else:
            by_prefill, by_decode = self.decode_beside_prefill, self.decode_beside_decode
        return 1.0 + num_prefill * (by_prefill - 1.0) + num_decode * (by_decode - 1.0)


class Profile(_Part):
    """One kind of worker: a model on some hardware. ``loop_s`` passes between two steps."""

    format: Literal["splitserve-profile"] = "splitserve-profile"
    version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=200)]
    hardware: str = ""
    gpus: Annotated[int, Field(ge=1, le=1024)] = 1  # that one worker spans
    expert_parallel: bool = False  # as the workers' option
    source: str = ""  # how it came about
    numerics: Numerics | None = None  # None: not known
    memory: Memory
    prefill: StepModel
    decode: StepModel
    prefill_loop_s: Seconds = 0.0
    decode_loop_s: Seconds = 0.0
    handoff: HandoffModel = HandoffModel()
    movers: dict[str, HandoffModel] = {}  # by name, of several measured ones; ``handoff`` is the best
    start_s: Seconds = 0.0  # from the start of the process to being ready
    flip_s: Seconds | None = None  # None: not measured
    noise_cv: Annotated[float, Field(ge=0, le=10)] = 0.0  # of step times about the model
    contention: Contention | None = None  # None: not measured; workers of one host do not slow each other
    power: Power | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None

    @property
    def once_s(self) -> float:
        """Seconds that any step takes, paid once by one of both prompts and sequences."""
        return min(self.prefill.base_s, self.decode.base_s)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file; or, by its name alone, a profile that is shipped or computed (``MODEL@8xh100``).

        Raises ProfileError."""
        if not path.exists() and path.name in shipped_names():
            path = SHIPPED / f"{path.name}.json"
        try:
            if "@" in path.name and not path.exists():
                return cls.model_validate(content_of(str(path)), strict=False)
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "its content"
            raise ProfileError(
                f"{path} is no profile of a version known here: {place}: {first['msg']}"
            ) from None
        except ValueError as error:
            raise ProfileError(str(error)) from None
        except OSError as error:
            known = ", ".join(shipped_names())
            raise ProfileError(
                f"cannot read the profile {path}: {error.strerror or error}; make one with `splitserve "
                f"profile`, or name one that is shipped: {known}; or computed: llama-3.1-70b-fp8@8xh100"
            ) from None

    def with_slower_steps(self) -> Profile:
        """Every step takes longer by as much as the fit is off on average, which is more than it will be for
        long, unless all errors go this way. Where a fit's error is not known it is taken as none."""
        prefill, decode = (m.times(1 + (m.mean_error or 0.0)) for m in (self.prefill, self.decode))
        return self.model_copy(update={"prefill": prefill, "decode": decode})

    def write(self, path: Path) -> None:
        """Raises ProfileError."""
        try:
            path.write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"cannot write the profile {path}: {error.strerror or error}") from None


def shipped_names() -> list[str]:
    """What `--profile NAME` knows without a file."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))
