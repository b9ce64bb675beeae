"""How many workers each pool of each revision runs next, and which workers change their roles. Pure.

It keeps no state: every pass decides by the state of the cluster. So a restarted operator continues a change,
and two operators decide the same.

A rollout has as many steps as the largest new pool has workers. A step is ready when every new pool has its
share of workers ready, so that both roles advance together:

new revision      grows to the share of the next step, never shrinks
old revisions     shrink by the share of the ready steps, never grow
                  keep a worker of each pool until the new revision has a pair
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one StatefulSet."""

    name: str
    revision: str
    workers: int
    """Number of workers in full."""
    replicas: int = 0  # that its StatefulSet asks for
    ready: int = 0
    pods: int = 0  # that exist, also those that drain

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.revision


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the coordinator sees it, in one role."""

    process: str  # "": it cannot change its role
    role: str
    is_draining: bool
    num_dispatches: int


Replicas = dict[tuple[str, str], int]


def next_replicas(new: Sequence[Pool], old: Sequence[Pool], surge: bool) -> Replicas:
    """Return the replicas of every pool by name and revision. ``surge``: a step's new workers start before
    the old ones that they replace end."""
    if not any(pool.replicas or pool.pods for pool in old):
        return {pool.key: pool.workers for pool in new} | {pool.key: 0 for pool in old}
    num_steps = max((1, *(pool.workers for pool in new)))
    ready = _ready_steps(new, num_steps)
    begun = min(num_steps, ready + 1)
    wanted = {
        pool.key: min(pool.workers, max(pool.replicas, -(-begun * pool.workers // num_steps))) for pool in new
    }
    replaced = ready if surge else begun
    left: dict[str, int] = {}
    for name in {pool.name for pool in old}:
        workers = max(pool.workers for pool in old if pool.name == name)
        left[name] = max(0 if ready else 1, workers - replaced * workers // num_steps)
    for pool in sorted(old, key=lambda pool: (-pool.ready, pool.key)):
        wanted[pool.key] = min(pool.replicas, left[pool.name])
        left[pool.name] -= wanted[pool.key]
    return wanted


def _ready_steps(new: Sequence[Pool], num_steps: int) -> int:
    """Return the number of steps for which every new pool has its share ready."""
    return min((pool.ready * num_steps // pool.workers for pool in new if pool.workers), default=num_steps)


def resized(replicas: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int]:
    """Return the replicas of pools of flexible workers, by pool. Only their total follows ``wanted``: the
    rest is done by flips, which are quicker than new pods."""
    change = sum(wanted.values()) - sum(replicas.values())
    found = dict(replicas)
    for name in sorted(found, key=lambda name: wanted[name] - replicas[name], reverse=change > 0):
        lack = wanted[name] - found[name]
        step = min(change, max(0, lack)) if change > 0 else max(change, min(0, lack))
        found[name] += step
        change -= step
    return found


def following(
    before: Mapping[str, int],
    bounds: Mapping[str, tuple[str, int, int]],
    wanted: Mapping[str, int],
    num_present: int,
) -> dict[str, int]:
    """Return the workers of each pool that the pool controller wants. ``bounds``: role, least and most, by
    pool. Nothing changes while a worker starts, drains or is down: the controller counts the present ones."""
    if num_present != sum(before.values()):
        return dict(before)
    return {
        name: min(most, max(least, wanted.get(role, before[name])))
        for name, (role, least, most) in bounds.items()
    }


def flips(
    workers: Sequence[Worker], wanted: Mapping[str, int], may_flip: Collection[str]
) -> list[tuple[str, str]]:
    """Return processes and their new roles, the least busy first. ``wanted``: workers by role; ``may_flip``:
    processes that stay. A worker that starts is not waited for, and none flips in its place."""
    present = {role: [w for w in workers if w.role == role and not w.is_draining] for role in wanted}
    for role, others in present.items():
        for lacking, found in present.items():
            count = min(len(others) - wanted[role], wanted[lacking] - len(found), len(others) - 1)
            if count > 0:
                free = sorted(
                    (w for w in others if w.process in may_flip), key=lambda w: (w.num_dispatches, w.process)
                )
                return [(worker.process, lacking) for worker in free[:count]]
    return []
