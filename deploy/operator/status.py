"""The status of a SplitserveCluster. Pure, except for the time of a transition."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from .coordinator import State
from .manifests import ROLES, Manifests, Object
from .rollout import Pool


def progress(
    manifests: Manifests, pools: Sequence[Pool], state: State | None, num_flips: int
) -> tuple[str, str, Object]:
    """Return phase, message and fields. ``num_flips``: that this pass has ordered."""
    new = [pool for pool in pools if pool.revision == manifests.revision]
    lacking = [f"{p.name} {p.ready}/{p.workers}" for p in new if p.ready < p.replicas or not p.replicas]
    phase, message = "Serving", ""
    if len(new) < len(pools):
        shares = ", ".join(f"{p.name} {p.ready}/{p.workers}" for p in new)
        phase, message = "Rolling", f"to revision {manifests.revision}: {shares}"
    elif lacking or num_flips:
        phase, message = "Scaling", ", ".join(lacking) or f"{num_flips} workers change their roles"
    if state is None:
        present = [spec.role for p in pools if (spec := manifests.pools.get(p.name)) for _ in range(p.ready)]
    else:
        present = [worker.role for worker in state.workers if not worker.is_draining]
    counts = {role: present.count(role) for role in ROLES}
    rows = [{"name": p.name, "revision": p.revision, "replicas": p.replicas, "ready": p.ready} for p in pools]
    ratio = f"{counts['prefill']}P:{counts['decode']}D"
    return phase, message, {"revision": manifests.revision, "ratio": ratio, "pools": rows}


def status_with(before: Object, phase: str, message: str, fields: Object, generation: int) -> Object:
    """Return the status with these fields, and the condition Ready, which keeps its time of transition."""
    [condition] = before.get("conditions") or [{}]
    ready = "True" if phase == "Serving" else "False"
    since = condition.get("lastTransitionTime")
    if condition.get("status") != ready or not since:
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    after = {
        "type": "Ready",
        "status": ready,
        "reason": phase,
        "message": message,
        "lastTransitionTime": since,
        "observedGeneration": generation,
    }
    shown = {"phase": phase, "message": message, "observedGeneration": generation, "conditions": [after]}
    return before | fields | shown
