"""What could be built from the hardware there is: kinds of workers, and clusters of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...engine.latency_profile import Power, Profile
from ..errors import SimulationError
from ..simulator.cluster import Cluster, Pool, PoolRole


@dataclass(frozen=True)
class Kind:
    """One kind of worker. ``most``: workers there can be; None: as many as there are GPUs. ``stock``: name of
    its GPUs, which other kinds may share. Price and power of a whole worker."""

    name: str
    profile: Profile
    gpus: int = 1  # that one worker spans
    price_per_hour: float | None = None
    power: Power | None = None
    prefills: bool = True
    decodes: bool = True
    most: int | None = None
    stock: str = ""

    @classmethod
    def of(cls, profile: Profile, gpus: int = 1, stock: str = "") -> Kind:
        """A kind with the profile's price and power."""
        return cls(profile.name, profile, gpus, profile.price_per_hour, profile.power, stock=stock)

    def hands_to(self, other: Kind) -> bool:
        """Whether the other's blocks hold the same: as many tokens, of equally quantised weights."""
        mine, theirs = self.profile, other.profile
        alike = mine.numerics is None or theirs.numerics is None or mine.numerics == theirs.numerics
        return alike and mine.memory.block_size == theirs.memory.block_size


ROLES: tuple[PoolRole, ...] = ("prefill", "decode", "colocated")


@dataclass(frozen=True, slots=True)
class Group:
    """Equal workers of one pool. ``kind``: index into the hardware."""

    role: PoolRole
    count: int
    kind: int
    max_num_seqs: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """``max_batch_tokens``: the chunk budget of a step's prompts; ``max_num_seqs``: the largest decode batch.
    The kinds are indices into the hardware; colocated workers are of ``prefill_kind``. ``mover``: one that
    the profiles know; empty: their only one. ``beside``: workers of other kinds in the same pools."""

    prefill: int
    decode: int
    colocated: int
    max_batch_tokens: int
    max_num_seqs: int
    prefill_kind: int = 0
    decode_kind: int = 0
    mover: str = ""
    beside: tuple[Group, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """All workers, by pool and kind."""
        seqs = self.max_num_seqs
        own = (
            Group("prefill", self.prefill, self.prefill_kind, seqs),
            Group("decode", self.decode, self.decode_kind, seqs),
            Group("colocated", self.colocated, self.prefill_kind, seqs),
        )
        return tuple(group for group in (*own, *self.beside) if group.count)

    @property
    def num_workers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def shape(self) -> Candidate:
        """These workers, whatever their settings."""
        beside = tuple(replace(group, max_num_seqs=1) for group in self.beside)
        return replace(self, max_batch_tokens=1, max_num_seqs=1, mover="", beside=beside)

    @property
    def is_whole(self) -> bool:
        """Whether its own workers can serve."""
        return self.colocated > 0 or min(self.prefill, self.decode) > 0

    @property
    def is_split(self) -> bool:
        """Every worker does one thing only."""
        return self.prefill > 0 and not self.colocated

    @property
    def ratio(self) -> str:
        """``10P:6D``, ``16 colocated``, ``6P:6D and 4 colocated``, or ``6P and 10 colocated``."""
        counts = Counter[PoolRole]()
        for group in self.groups:
            counts[group.role] += group.count
        return _joined([Group(role, num, 0) for role, num in counts.items()], lambda _: "", ":")

    @property
    def options(self) -> str:
        """Its settings in words."""
        mover = f", KV blocks by {self.mover}" if self.mover else ""
        return f"steps of {self.max_batch_tokens} prompt tokens, batches of {self.max_num_seqs}{mover}"

    def joined_by(self, role: PoolRole, kind: int, count: int) -> Candidate:
        """Add workers of another kind to a pool."""
        return replace(self, beside=(*self.beside, Group(role, count, kind)))

    def moved(self, by: int) -> Candidate | None:
        """Move ``by`` workers from decode to prefill; None if there are not enough."""
        moved = self.with_more(by, -by)
        left = moved.decode if self.decode else moved.colocated
        return moved if self.prefill and min(moved.prefill, left) >= 1 else None

    def with_more(self, prefill: int = 0, decode: int = 0) -> Candidate:
        """Add workers; colocated ones where they alone do one thing."""
        if not self.prefill:
            return replace(self, colocated=self.colocated + prefill + decode)
        if not self.decode:
            return replace(self, prefill=self.prefill + prefill, colocated=self.colocated + decode)
        return replace(self, prefill=self.prefill + prefill, decode=self.decode + decode)


def _joined(groups: Sequence[Group], suffix: Callable[[Group], str], colon: str) -> str:
    prefill, decode, together = (
        " + ".join(f"{g.count}{letter}{suffix(g)}" for g in groups if g.role == role)
        for role, letter in zip(ROLES, ("P", "D", " colocated"), strict=True)
    )
    return " and ".join(filter(None, (colon.join(filter(None, (prefill, decode))), together)))


@dataclass(frozen=True)
class Hardware:
    """The kinds of workers to choose from."""

    kinds: tuple[Kind, ...]
    workers_per_host: int = 1

    def words(self, candidate: Candidate) -> str:
        """The ratio, with the kinds' names where there are several."""
        if len(self.kinds) == 1:
            return candidate.ratio
        return _joined(candidate.groups, lambda group: f" ({self.kinds[group.kind].name})", " : ")

    def pools(self, candidate: Candidate) -> Iterator[tuple[Group, Kind]]:
        """The candidate's groups, each with its kind."""
        return ((group, self.kinds[group.kind]) for group in candidate.groups)

    def cluster(self, candidate: Candidate, max_queue: int) -> Cluster:
        """The cluster to simulate."""
        pools = [
            Pool(
                role=group.role,
                count=group.count,
                profile=with_mover(kind.profile, candidate.mover),
                max_batch_tokens=candidate.max_batch_tokens,
                max_num_seqs=group.max_num_seqs,
            )
            for group, kind in self.pools(candidate)
        ]
        return Cluster(pools=tuple(pools), max_queue=max_queue, workers_per_host=self.workers_per_host)

    def fit_errors(self, candidate: Candidate) -> tuple[float | None, float | None]:
        """Mean relative errors of the profile's fit, of prefill and decode steps. None: not known."""
        prefill, decode = self.kinds[candidate.prefill_kind], self.kinds[candidate.decode_kind]
        return prefill.profile.prefill.mean_error, decode.profile.decode.mean_error

    def can_join(self, kind: int, role: PoolRole, candidate: Candidate) -> bool:
        """Whether workers of this kind can be added to the role's pool; not where it has such workers."""
        one, pool = self.kinds[kind], [group for group in candidate.groups if group.role == role]
        does = (one.prefills or role == "decode") and (one.decodes or role == "prefill")
        alike = all(self.kinds[group.kind].hands_to(one) for group in candidate.groups)
        return does and alike and bool(pool) and all(group.kind != kind for group in pool)

    def with_slower_steps(self) -> Hardware:
        """The same hardware with steps slower by the profiles' mean errors."""
        return replace(
            self, kinds=tuple(replace(kind, profile=kind.profile.with_slower_steps()) for kind in self.kinds)
        )

    def num_gpus(self, candidate: Candidate) -> int:
        return sum(group.count * kind.gpus for group, kind in self.pools(candidate))

    def price_per_hour(self, candidate: Candidate) -> float | None:
        """None where a kind has no price."""
        prices = [(group.count, kind.price_per_hour) for group, kind in self.pools(candidate)]
        return (
            None
            if any(price is None for _, price in prices)
            else sum(count * (price or 0.0) for count, price in prices)
        )

    def watts(self, candidate: Candidate) -> float | None:
        """What must be provided for: every worker at its role's power. None where a kind's is not known."""
        total = 0.0
        for group, kind in self.pools(candidate):
            if kind.power is None:
                return None
            of_role = {"prefill": kind.power.prefill_w, "decode": kind.power.decode_w}
            total += group.count * of_role.get(group.role, max(of_role.values()))
        return total

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that some kind takes."""
        return max(kind.profile.memory.longest for kind in self.kinds)

    @cached_property
    def movers(self) -> tuple[str, ...]:
        """Those that every profile knows, or the nameless one."""
        common = set.intersection(*(set(kind.profile.movers) for kind in self.kinds))
        return tuple(sorted(common)) or ("",)


def with_mover(profile: Profile, mover: str) -> Profile:
    """Raises SimulationError."""
    if not mover:
        return profile
    if mover not in profile.movers:
        known = ", ".join(profile.movers) or "none"
        raise SimulationError(
            f"the profile {profile.name} has not measured the mover {mover}; it knows {known}"
        )
    return profile.model_copy(update={"handoff": profile.movers[mover]})


def middle_first(candidates: list[Candidate]) -> list[Candidate]:
    """Five of them, evenly spread; all if they are few."""
    return (
        candidates
        if len(candidates) <= 4
        else [candidates[round(i * (len(candidates) - 1) / 4)] for i in range(5)]
    )
