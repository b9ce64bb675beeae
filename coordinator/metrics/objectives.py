"""What requests may take. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Objectives:
    """``ttft_s``, ``tpot_s``: what a request may take, None: anything; ``attainment``: the share that must
    keep both at once."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    attainment: float = 0.9
    ttft_by_class: Mapping[str, float] = field(default_factory=dict)
    """By priority class, where ``ttft_s`` is None."""

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None or bool(self.ttft_by_class)

    def ttft_of(self, priority_class: str) -> float:
        """The bound for requests of this class; infinite without one."""
        return (
            self.ttft_s if self.ttft_s is not None else self.ttft_by_class.get(priority_class, float("inf"))
        )

    def as_json(self) -> dict[str, object] | None:
        """None without any bound."""
        return asdict(self) if self else None
