"""What the load generator's client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """Times are seconds since the start of the run; ``arrivals`` has one a streamed event."""

    start: float
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
