"""The device that computes the steps of a worker's process: one after the other, also while the loop is late
to collect the one before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from simulation.drafter import VirtualDrafter
from simulation.images import as_read
from simulation.model import NUM_LAYERS
from simulation.states import row_states

from splitserve.decode.rows import DecodeStep
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step.step_thread import Finished, OnLayer
from splitserve.transport.messages.blocks import num_behind
from splitserve.worker.steps import RunningStep

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess

PREFILL_STEP_S, DECODE_STEP_S, TOKEN_S = 0.008, 0.02, 0.00005
SLOW = 20
LATE_WAKE = 0.2
"""How often the loop does other things when a step has ended and another has begun."""


class StepFailed(Exception):
    """The adversary's."""


@dataclass(slots=True, eq=False)
class Submitted:
    """``output``: of a step that has read and written everything at once. ``num_layers`` are written."""

    step: RunningStep
    on_layer: OnLayer | None
    follows: bool
    output: StepOutput | None = None
    num_layers: int = 0


class VirtualStepDevice:
    """See ``StepDevice``. ``launches``: it wants the step behind one with prompts, too, as a GPU does."""

    busy_seconds = 0.0

    def __init__(self, process: WorkerProcess, launches: bool) -> None:
        self._process, self._world, self._launches = process, process.world, launches
        self._running: Submitted | None = None
        self._next: Submitted | None = None  # begins when that one ends
        self._outbox: deque[Finished[RunningStep]] = deque()
        self._num_in_flight = 0
        self._nearly_done = False  # the one submitted last
        self._broken = False  # the last step that is over failed, or followed one that did
        self._sampled_last: list[int] = []
        self._drafter = VirtualDrafter(process)

    @property
    def busy(self) -> bool:
        return self._num_in_flight > 0

    @property
    def adapters(self) -> set[str]:
        """Those that steps under way name."""
        under_way = [each for each in (self._running, self._next) if each is not None]
        return {content for each in under_way for content in each.step.batch.adapters}

    @property
    def wants_next(self) -> bool:
        return not self.busy or (self._num_in_flight == 1 and self._nearly_done)

    def submit(self, step: RunningStep, on_layer: OnLayer | None = None) -> None:
        self._watch_blocks(step)
        self._drafter.look(step)
        submitted = Submitted(step, on_layer, self.busy)
        self._num_in_flight += 1
        self._nearly_done = False
        if self._running is None:
            self._begin(submitted)
        else:
            self._next = submitted

    def collect(self, patience_s: float = 0.0) -> Finished[RunningStep] | None:
        if not self._outbox:
            return None
        self._num_in_flight -= 1
        finished = self._outbox.popleft()
        if self._num_in_flight:
            kind = "prefill steps made ahead" if finished.step.prompts is not None else "steps made ahead"
            self._world.counts[kind] += 1
        return finished

    def stop(self) -> None:
        """Nothing to release."""

    def _watch_blocks(self, step: RunningStep) -> None:
        batch, process = step.batch, self._process
        size, window = process.memory.block_size, process.model.window
        blocks: set[int] = set()
        queries = np.diff(batch.query_start_loc).tolist()
        rows = zip(batch.block_tables.tolist(), batch.seq_lens.tolist(), queries, strict=True)
        for table, length, query in rows:
            blocks.update(table[num_behind(length - query, window, size) : -(-length // size)])
        written = {slot // size for slot in batch.slot_mapping.tolist()} | self._drafter.blocks(batch)
        blocks |= written
        for states in row_states(batch):
            written.update(states.written, states.snapshot)
            blocks.update(states.read, states.written, states.snapshot)
            self._world.counts["snapshots written"] += bool(states.snapshot)
            self._world.counts["snapshots read"] += process.blocks.are_cached(states.read)
        process.blocks.begin_step(step, blocks, written)

    def _begin(self, submitted: Submitted) -> None:
        """A step reads and writes at any time between its begin and its end: now and then at once, else as
        late as may be."""
        process, world, step = self._process, self._world, submitted.step
        self._broken = self._broken and submitted.follows
        if self._broken:
            world.counts["steps skipped"] += 1
            self._finish(submitted, Finished(step, None, None))
            process.after(0.0, process.poll)
            return
        self._running = submitted
        duration = PREFILL_STEP_S if step.sequences is None else DECODE_STEP_S
        duration += TOKEN_S * step.batch.num_tokens
        if world.queue.now < process.slow_until:
            duration *= SLOW
        if world.random.random() < 0.3:
            submitted.output = process.memory.execute(step.batch, self._token_ids(step.batch))
        elif submitted.on_layer is not None and step.progress._every:
            for layer in range(NUM_LAYERS):
                process.after(duration * (layer + 0.9) / NUM_LAYERS, self._layer_done, submitted, layer)
        process.after(duration, self._end, submitted)
        if self._launches or step.sequences is not None:
            process.after(duration * world.random.random(), self._is_nearly_done, submitted)

    def _is_nearly_done(self, submitted: Submitted) -> None:
        if self._running is submitted and self._next is None:
            self._nearly_done = True
            self._process.poll()

    def _layer_done(self, submitted: Submitted, layer: int) -> None:
        hangs = self._process.hung_until > self._world.queue.now
        if self._running is not submitted or submitted.num_layers != layer or hangs:
            return  # the step has ended, or does not go on
        batch = submitted.step.batch
        self._process.memory.write_layer(batch, self._token_ids(batch), layer)
        submitted.num_layers = layer + 1
        if submitted.on_layer is not None:
            submitted.on_layer(layer + 1)

    def _end(self, submitted: Submitted) -> None:
        process, world, step = self._process, self._world, submitted.step
        if (left := process.hung_until - world.queue.now) > 0:
            process.after(left, self._end, submitted)
            return
        if world.poison.fells(process, step):
            return
        output = submitted.output or process.memory.execute(
            step.batch, self._token_ids(step.batch), from_layer=submitted.num_layers
        )
        faults = world.scenario.faults
        self._running, behind, self._next = None, self._next, None
        if world.strikes(faults.step_error, "steps failed"):
            self._broken = True
            self._finish(submitted, Finished(step, None, StepFailed("the adversary says so")))
        elif world.strikes(faults.step_no_memory, "steps out of memory"):
            self._broken = True
            self._finish(submitted, Finished(step, None, MemoryError("the adversary says so"), True))
        else:
            self._sampled_last = output.token_ids.tolist()
            if step.sequences is not None:
                output = self._drafter.add(step.sequences.step, step.batch, output)
            self._finish(submitted, Finished(step, output, None))
        self._nearly_done = behind is None
        if behind is not None:
            self._begin(behind)
            if self._running is not None and world.random.random() < LATE_WAKE:
                return
        process.poll()

    def _finish(self, submitted: Submitted, finished: Finished[RunningStep]) -> None:
        if submitted.step.sequences is not None and finished.output is not None:
            self._count_drafts(submitted.step.sequences.step, finished.output)
        self._process.blocks.end_step(submitted.step)
        self._outbox.append(finished)

    def _count_drafts(self, step: DecodeStep, output: StepOutput) -> None:
        num_seqs = len(step.members)
        for row, sequence in list(enumerate(step.sequences))[num_seqs:]:
            before = row - 1 if step.sequences[row - 1] is sequence else step.members.index(sequence)
            right = output.token_ids[before] == step.batch.token_ids[row]
            what = "of the model" if sequence in step.drafts.by_model else "of the text"
            self._world.counts[f"drafts {what} that were {'right' if right else 'wrong'}"] += 1

    def _token_ids(self, batch: Batch) -> list[int]:
        """Return the batch's tokens as the model reads them, with those that the step before has sampled."""
        tokens: list[int] = batch.token_ids.tolist()
        if batch.fed_from is not None:
            for row, source in enumerate(batch.fed_from.tolist()):
                if source >= 0:
                    tokens[row] = self._sampled_last[source]
        return as_read(batch, tokens)
