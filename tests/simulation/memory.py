"""A worker's KV pool, and what a model runner does with it."""

from __future__ import annotations

import numpy as np
from simulation.model import MASK, logprob, mix, next_token

from splitserve.engine.batch import Batch, Logprobs, StepOutput


class Memory:
    """One value a token: ``slots[block * block_size + offset]``."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [-1 - i for i in range(num_blocks * block_size)]
        self._sums: list[int | None] = [None] * num_blocks

    def read(self, block: int) -> list[int]:
        size = self.block_size
        return self.slots[block * size : (block + 1) * size]

    def write(self, block: int, start: int, values: list[int]) -> None:
        """Overwrites slots ``start`` and following of a block."""
        first = block * self.block_size + start
        self.slots[first : first + len(values)] = values
        self._sums[block] = None

    def checksum(self, block: int) -> int:
        return hash(tuple(self.read(block))) & MASK

    def execute(self, batch: Batch) -> StepOutput:
        """Writes each token's slot, reads all earlier ones."""
        tokens = np.full(batch.num_seqs, -1, np.int32)
        output = StepOutput(tokens)
        starts, lens, tables = batch.query_start_loc.tolist(), batch.seq_lens.tolist(), batch.block_tables.tolist()
        positions, ids, slots = batch.positions.tolist(), batch.token_ids.tolist(), batch.slot_mapping.tolist()
        for row, table in enumerate(tables):
            start, end = starts[row], starts[row + 1]
            self._write_tokens(table, positions[start], ids[start:end], slots[start:end])
            state = batch.sampling[row]
            if state is not None:
                tokens[row] = token = next_token(self._total(table, lens[row]))
                if state.params.logprobs is not None:
                    output.logprobs[row] = Logprobs(logprob(token))
            if batch.prompt_logprobs and batch.prompt_logprobs[row] is not None:
                output.prompt_logprobs[row] = [Logprobs(logprob(token)) for token in batch.next_prompt_ids[row]]
        return output

    def _write_tokens(self, table: list[int], position: int, ids: list[int], slots: list[int]) -> None:
        size, memory = self.block_size, self.slots
        kv = memory[table[(position - 1) // size] * size + (position - 1) % size] if position else 0
        for token, slot in zip(ids, slots, strict=True):
            kv = memory[slot] = mix(kv, token)
            self._sums[slot // size] = None

    def _total(self, table: list[int], length: int) -> int:
        """The sum of a sequence's slots; a whole block's is kept until the block is written again."""
        size, sums, total = self.block_size, self._sums, 0
        full, rest = divmod(length, size)
        for block in table[:full]:
            known = sums[block]
            if known is None:
                known = sums[block] = sum(self.read(block))
            total += known
        if rest:
            first = table[full] * size
            total += sum(self.slots[first : first + rest])
        return total
