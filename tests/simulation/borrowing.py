"""What must be true whenever a request is borrowed: the pools have no room for it, and the bounds hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitserve.coordinator.lifecycle.actions import Action
from splitserve.coordinator.lifecycle.request import Request
from splitserve.coordinator.lifecycle.worker import WorkerRecord

if TYPE_CHECKING:
    from simulation.coordinator_process import CoordinatorProcess


def watch_borrowing(coordinator: CoordinatorProcess) -> None:
    """Check each dispatch of this coordinator before it is made."""
    core, world = coordinator.core, coordinator.world
    machine, pools = core._machine, core.pools
    dispatch = machine.dispatch

    def watch(request: Request, prefill: WorkerRecord, decode: WorkerRecord, *more: Any) -> list[Action]:
        if prefill.is_reserve or decode.is_reserve:
            world.counts["prompts borrowed" if prefill.is_reserve else "sequences borrowed"] += 1
            for wrong in _wrong(request, prefill, decode):
                world.violated(f"{coordinator.name}: {request.request_id} is borrowed, {wrong}")
        return dispatch(request, prefill, decode, *more)

    def _wrong(request: Request, prefill: WorkerRecord, decode: WorkerRecord) -> list[str]:
        wrong, num_tokens = [], request.num_tokens
        if (prefill.hello.process, prefill.hello.pid) != (decode.hello.process, decode.hello.pid):
            wrong.append(f"by two processes: {prefill.hello.worker_id} and {decode.hello.worker_id}")
        if prefill.draining or decode.draining:
            wrong.append("by a process that drains")
        kept_free = any(core._placement._overtaking._kept_free.values())  # for requests with an adapter
        if not (request.num_attempts or machine.suspicion.suspects or pools.has_mixed or kept_free):
            open_ones = [pools.open_of_role(role) for role in ("prefill", "decode")]
            free = [any(w.room >= num_tokens and w.has(request.adapter) for w in role) for role in open_ones]
            if all(free):
                wrong.append("and the pools have room")
        in_all = num_tokens + prefill.pending_tokens
        if prefill.is_reserve and prefill.pending and in_all > prefill.max_batch_tokens:
            wrong.append("beyond one batch of borrowed prompts")
        if decode.is_reserve:
            if len(decode.dispatches) + decode.num_others >= decode.max_num_seqs // 2:
                wrong.append("beyond half of the rows")
            left = decode.blocks_reported - decode.pending_blocks - decode.blocks_for(num_tokens)
            if left < decode.num_blocks // 2:
                wrong.append("beyond half of the blocks")
        return wrong

    machine.dispatch = watch  # type: ignore[method-assign]
