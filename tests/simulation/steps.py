"""The thread that computes, of a worker process: one step after the other, also while the loop is late to
hear of the one before.

A decode worker's next step, and that of a prefill worker on a GPU, is made before the one that runs has
ended, and begins when that one ends; a decode worker's takes its tokens from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.transport.messages.blocks import num_behind

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess

FAILED, SKIPPED, NO_MEMORY = "failed", "skipped", "out of memory"


class Steps:
    """``submit`` while it ``wants_next``; ``collect`` gives what has ended, oldest first."""

    def __init__(self, process: WorkerProcess, ahead: bool) -> None:
        self._process, self._world, self._ahead = process, process.world, ahead
        self.running: Any = None  # the step that runs now, if one does
        self._next: Any = None  # made ahead: it begins when that one ends
        self._nearly_done = False  # the one that runs
        self._ended: list[
            tuple[Any, Any]
        ] = []  # (step, outcome): an output, FAILED, NO_MEMORY or SKIPPED; not collected
        self._sampled_last: list[int] = []

    @property
    def wants_next(self) -> bool:
        return not self._ended and (self.running is None or (self._nearly_done and self._next is None))

    @property
    def any_ended(self) -> bool:
        """Whether there is something to ``collect``."""
        return bool(self._ended)

    def submit(self, step: Any) -> None:
        batch, size = step.batch, self._process.memory.block_size
        blocks: set[int] = set()
        queries = np.diff(batch.query_start_loc).tolist()
        for table, length, query in zip(
            batch.block_tables.tolist(), batch.seq_lens.tolist(), queries, strict=True
        ):
            blocks.update(
                table[num_behind(length - query, self._process.model.window, size) : -(-length // size)]
            )
        self._process.blocks.begin_step(step, blocks, {slot // size for slot in batch.slot_mapping.tolist()})
        if self.running is None:
            self._begin(step)
        else:
            self._next = step

    def collect(self) -> list[tuple[Any, Any]]:
        """(step, outcome)."""
        ended, self._ended = self._ended, []
        if self.running is not None:
            self._world.counts[
                "prefill steps made ahead" if self._process.role == "prefill" else "steps made ahead"
            ] += 1
        return ended

    def _begin(self, step: Any) -> None:
        process, world = self._process, self._world
        self.running, self._nearly_done = step, False
        duration = process.base_step_s + 0.00005 * step.batch.num_tokens
        if world.queue.now < process.slow_until:
            duration *= 20
        # A step reads and writes at any time between its begin and its end: now and then at once, else as
        # late as may be.
        output = (
            process.memory.execute(step.batch, self.token_ids(step.batch))
            if world.random.random() < 0.3
            else None
        )
        process.after(duration, self._end, step, output)
        if output is None:
            process.begin(step, duration)
        if self._ahead:
            process.after(duration * world.random.random(), self._make_next, step)

    def _make_next(self, step: Any) -> None:
        if self.running is step:
            self._nearly_done = True
            self._process.turn()

    def _end(self, step: Any, output: Any) -> None:
        process, world = self._process, self._world
        if (left := process.hung_until - world.queue.now) > 0:
            process.after(left, self._end, step, output)
            return
        if world.poison.fells(process, step):
            return
        if output is None:
            output = process.finish(step)
        process.blocks.end_step(step)
        self.running, behind, self._next = None, self._next, None
        failed = FAILED if world.strikes(world.scenario.faults.step_error, "steps failed") else None
        if failed or world.strikes(world.scenario.faults.step_no_memory, "steps out of memory"):
            self._ended.append((step, failed or NO_MEMORY))
            if behind is not None:
                world.counts["steps skipped"] += 1
                process.blocks.end_step(behind)
                self._ended.append((behind, SKIPPED))
        else:
            self._sampled_last = output.token_ids.tolist()
            self._ended.append((step, output))
            if behind is not None:
                self._begin(behind)
                if world.random.random() < 0.2:
                    return  # the loop has other things to do, and hears of it later
        process.turn()

    def token_ids(self, batch: Any) -> list[int]:
        """Of the batch, with those that the step before has sampled for it."""
        tokens: list[int] = batch.token_ids.tolist()
        if batch.fed_from is not None:
            for row, source in enumerate(batch.fed_from.tolist()):
                if source >= 0:
                    tokens[row] = self._sampled_last[source]
        return tokens
