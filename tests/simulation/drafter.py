"""The prediction layer of a worker's model: what it drafts, and which slots it writes for that.

Its drafts are right more often than not. Now and then it drafts less than it was asked for. It also drafts
behind rows whose input was wrong, and behind rows that others follow: a scheduler must drop such drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from simulation.model import NUM_LAYERS, VOCABULARY

from splitserve.decode.rows import DecodeStep
from splitserve.decode.sequences import DecodeSequence
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.prefill.chunks import Chunk
from splitserve.worker.steps import RunningStep

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess

JUNK = -1
"""In slots behind a sequence's tokens: nothing reads them before a token has been written there."""


class VirtualDrafter:
    """``add`` drafts at a step's end. Before the next one ``look`` compares what is taken for its drafts."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process, self._world = process, process.world
        self._random = Random(f"drafts {process.world.seed} {process.pid}")
        self._made: dict[DecodeSequence, tuple[int, list[int]]] = {}
        """Drafts of the last decode step, unless it has failed, with the sequence's length then."""

    def look(self, step: RunningStep) -> None:
        """A step begins, whose model drafts or not."""
        if step.prompts is not None and self._world.scenario.cluster.mtp:
            self._look_at_chunks(step.batch, step.prompts.step.chunks)
        if step.sequences is not None:
            self._look_at_rows(step.sequences.step)

    def _look_at_chunks(self, batch: Batch, chunks: list[Chunk]) -> None:
        """Behind each is the prompt's next token, or the one that is sampled."""
        assert batch.next_ids is not None
        rows = zip(
            batch.next_ids.tolist()[-len(chunks) :], batch.sampling[-len(chunks) :], chunks, strict=True
        )
        for next_id, sampling, chunk in rows:
            following = chunk.sequence.token_ids[chunk.end : chunk.end + 1].tolist()
            if [next_id] != following and (following or (next_id < 0) == (sampling is None)):
                self._violated(f"{next_id} is not behind a chunk of {chunk.sequence.request_id}")

    def _look_at_rows(self, step: DecodeStep) -> None:
        """Drafts of the model come from the step before, and follow a sequence's newest token."""
        for sequence, tokens in step.drafts.made.items():
            row = step.members.index(sequence)
            length, drafted = self._made.get(sequence, (0, []))
            if int(step.batch.seq_lens[row]) != length or drafted[: len(tokens)] != tokens:
                self._violated(f"{sequence.request_id} has drafts that are not of its newest token")
        self._made = {}

    def blocks(self, batch: Batch) -> set[int]:
        """Return the blocks of the slots that may be written for drafts."""
        size = self._process.memory.block_size
        return {slot // size for row in range(batch.num_seqs) for slot in self._slots(batch, row)}

    def add(self, step: DecodeStep, batch: Batch, output: StepOutput) -> StepOutput:
        """The step has run: return its output with drafts. ``batch``: the whole step's."""
        if batch.num_drafts is None:
            return output
        drafts = {}
        for row, is_newest in enumerate(self._newest(step, output)):
            count, length = int(batch.num_drafts[row]), int(batch.seq_lens[row])
            if not count or not (is_newest or self._random.random() < 0.3):
                continue
            if tokens := self._tokens(step.sequences[row].state.prompt_token_ids, length, count):
                drafts[row] = tokens
            if is_newest:
                self._made[step.sequences[row]] = length + 1, tokens
                for slot in self._slots(batch, row):
                    self._write(slot)
        return replace(output, drafts=drafts)

    def _newest(self, step: DecodeStep, output: StepOutput) -> Iterator[bool]:
        """Yield of each row whether its token is its sequence's newest."""
        tokens, inputs, num_seqs = output.token_ids.tolist(), step.batch.token_ids.tolist(), len(step.members)
        newest = {sequence: row for row, sequence in enumerate(step.members)}
        for row, sequence in list(enumerate(step.sequences))[num_seqs:]:
            before = newest[sequence]
            if step.indices[row] == step.indices[before] + 1 and tokens[before] == inputs[row]:
                newest[sequence] = row
        yield from (newest[sequence] == row for row, sequence in enumerate(step.sequences))

    def _tokens(self, prompt: object, length: int, count: int) -> list[int]:
        """Draft behind the token at ``length``: what the model mostly does is to repeat the prompt."""
        draw, text = self._random, list(prompt)  # type: ignore[call-overload]
        tokens = [text[(length + at) % len(text)] for at in range(1, count + 1)]
        if draw.random() < 0.2:
            tokens[draw.randrange(count)] = draw.randrange(VOCABULARY)
        return tokens if draw.random() < 0.8 else tokens[: draw.randrange(count)]

    def _slots(self, batch: Batch, row: int) -> list[int]:
        """Return the slots behind a row's token that may be written."""
        if batch.num_drafts is None:
            return []
        size, length = self._process.memory.block_size, int(batch.seq_lens[row])
        table, slots = batch.block_tables[row].tolist(), []
        for at in range(length, length + int(batch.num_drafts[row]) - 1):
            if at // size >= len(table):
                self._violated("a draft has no slot in its sequence's blocks")
                break
            slots.append(table[at // size] * size + at % size)
        return slots

    def _write(self, slot: int) -> None:
        size = self._process.memory.block_size
        for layer in range(NUM_LAYERS):
            self._process.memory.write(slot // size, layer * size + slot % size, [JUNK])

    def _violated(self, what: str) -> None:
        self._world.violated(f"{self._process.name}: {what}")
