"""Draws a simulation's timeline."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from .timeline import Timeline


def draw_timeline(path: Path, timeline: Timeline) -> None:
    """Requests in the system, busy devices, KV caches, by role; a PNG."""
    at = [s.at_s for s in timeline.samples]
    roles = sorted({name.split("-")[0] for name in timeline.names})
    figure, axes = plt.subplots(4, 1, figsize=(12, 11), sharex=True)
    axes[0].plot(at, [s.open for s in timeline.samples], label="in the system")
    axes[0].plot(at, [s.queued for s in timeline.samples], label="waiting in the coordinator")
    axes[0].set(ylabel="requests")
    for role in roles:
        chosen = [i for i, name in enumerate(timeline.names) if name.startswith(role)]
        for axis, value in ((1, "busy"), (2, "used"), (3, "running")):
            values = np.array([[getattr(s.workers[i], value) for i in chosen] for s in timeline.samples])
            (line,) = axes[axis].plot(at, values.mean(axis=1), label=role)
            axes[axis].fill_between(at, values.min(axis=1), values.max(axis=1), alpha=0.2, color=line.get_color())
    for axis, label in ((1, "busy share"), (2, "KV cache used"), (3, "sequences in steps, each")):
        axes[axis].set(ylabel=label, ylim=(0, None))
    for one in axes:
        one.legend(loc="upper right")
    axes[3].set(xlabel="seconds of the trace (line: mean of the pool; shade: least and most)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
