"""A language model whose KV cache can be wrong: every token depends on every slot that was read.

    kv[p]    = mix(kv[p - 1] as read from memory, token[p])
    token    = mix(sum of kv[0..p] as read from memory) mod VOCABULARY

so one corrupt, stale or foreign slot anywhere in a sequence's blocks changes what it says from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitserve.engine.batch import Batch, StepOutput

VOCABULARY = 997
EOS = 0
_MASK = (1 << 64) - 1


def mix(a: int, b: int) -> int:
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & _MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9) & _MASK


def expected_output(prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> tuple[list[int], str]:
    """What a run without faults answers, and why it ends."""
    kv, total, output = 0, 0, []
    for token in prompt:
        kv = mix(kv, token)
        total += kv
    while True:
        token = mix(total & _MASK, 1) % VOCABULARY
        output.append(token)
        if token == EOS and not ignore_eos:
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"
        kv = mix(kv, token)
        total += kv


class Memory:
    """A worker's KV pool: ``slots[block]`` holds one value a token."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [[-(b * 1000 + i) - 1 for i in range(block_size)] for b in range(num_blocks)]

    def checksum(self, block: int) -> int:
        value = 7
        for slot in self.slots[block]:
            value = mix(value, slot)
        return value

    def execute(self, batch: Batch, on_layer: object = None) -> StepOutput:
        """What a model runner does with a batch: writes each token's slot, reads all earlier ones."""
        tokens = np.full(batch.num_seqs, -1, np.int32)
        for row in range(batch.num_seqs):
            table = batch.block_tables[row].tolist()
            start, end = int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1])
            for i in range(start, end):
                position = int(batch.positions[i])
                block, offset = divmod(int(batch.slot_mapping[i]), self.block_size)
                before = self._read(table, position - 1) if position else 0
                self.slots[block][offset] = mix(before, int(batch.token_ids[i]))
            if batch.sampling[row] is not None:
                total = sum(self._read(table, p) for p in range(int(batch.seq_lens[row])))
                tokens[row] = mix(total & _MASK, 1) % VOCABULARY
        return StepOutput(tokens)

    def _read(self, table: list[int], position: int) -> int:
        return self.slots[table[position // self.block_size]][position % self.block_size]
