"""Which parts there are, in which order, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS = 550
"""The plan's length: a machine that is lent for ten minutes unpacks and installs first. More ``--seconds``
stretch every limit alike; with fewer, fewer parts are begun."""
KERNEL_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """``run``: MODULE:FUNCTION, called in a process of its own with a Place and ``arguments``; it yields
    Lines."""

    name: str
    limit_s: float
    run: str
    arguments: tuple[str, ...] = ()


def _here(name: str, limit_s: float, run: str, *arguments: str) -> Part:
    return Part(name, limit_s, f"{__package__}.{run}", arguments)


Stages = tuple[tuple[Part, ...], ...]
STAGES: Stages = (
    (
        _here("machine", 45, "machine:machine"),
        _here("compile", 45, "machine:compile_first"),
        _here("models", 45, "machine:models"),
    ),
    (
        *(
            _here(f"kernels {i + 1}", 70, "correctness:kernels", str(i), str(KERNEL_PROCESSES))
            for i in range(KERNEL_PROCESSES)
        ),
        _here("parity llama", 70, "parity:parity", "llama"),
        _here("parity qwen3", 70, "parity:parity", "qwen3"),
        _here("graphs", 70, "correctness:graphs"),
        _here("exact", 70, "correctness:exact"),
        _here("images", 70, "images:images"),
        _here("blocks", 70, "correctness:blocks"),
        _here("cpu", 70, "host:cpu"),
    ),
    (_here("engine 0.6B", 35, "speed:engine", "Qwen3-0.6B"),),
    (_here("serve cuda_ipc", 60, "serving:serve", "cuda_ipc"),),
    (_here("engine 8B", 50, "speed:engine", "Llama-3.1-8B"),),
    (_here("small kernels", 15, "speed:small_kernels"),),
    (_here("attention", 25, "speed:attention"),),
    (_here("start 8B", 50, "starting:start", "Llama-3.1-8B"),),
    (
        _here("failures", 70, "failures:failures"),
        _here("memcheck", 70, "correctness:sanitized", "memcheck"),
        _here("racecheck", 70, "correctness:sanitized", "racecheck"),
    ),
    (_here("serve fp8", 45, "serving:serve", "cuda_ipc", "fp8"),),
    (_here("linears", 30, "speed:linears"),),
    (_here("fa3", 20, "speed:flash_attention_3"),),
    (_here("serve tcp", 35, "serving:serve", "tcp"),),
)
"""First comes what is in doubt. Parts of a stage run side by side, as many as cores: only checks, and
the host's CPU, whose times are processor time."""
SPARE: Stages = (
    (_here("recurrent", 15, "speed:recurrent"),),
    (_here("serve two GPUs", 60, "serving:serve", "cuda_ipc", "", "2"),),
    (_here("gate and up", 25, "speed:gate_up"),),
    (_here("start 0.6B", 40, "starting:start", "Qwen3-0.6B"),),
    (_here("serve auto", 50, "serving:serve", "auto"),),
    (_here("worker", 60, "speed:worker"),),
    (_here("exact costs", 60, "speed:exact_costs"),),
    (_here("other tiles", 20, "speed:other_tiles"),),
    (_here("compile all", 120, "machine:compile_all"),),
)
"""Begun where the stages before have left time."""


def planned_seconds(stages: Stages) -> float:
    return sum(max(part.limit_s for part in stage) for stage in stages)


def table() -> str:
    """The plan, a row a stage."""
    rows, at = ["  from  limit  parts (those of a row run side by side)"], 0.0
    for stage in (*STAGES, *SPARE):
        limit = max(part.limit_s for part in stage)
        begins = f"{at:4.0f} s" if stage in STAGES else " spare"
        names = ", ".join(part.name for part in stage)
        names = names.replace(
            ", ".join(f"kernels {i + 1}" for i in range(KERNEL_PROCESSES)), f"kernels 1 to {KERNEL_PROCESSES}"
        )
        rows.append(f"{begins} {limit:4.0f} s  {names}")
        at += limit
    return "\n".join(rows)
