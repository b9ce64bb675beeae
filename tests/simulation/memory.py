"""A worker's KV pool, and what a model runner does with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from simulation.model import MASK, NUM_LAYERS, OF_A_STATE, deeper, first_layer, logprob, next_token
from simulation.states import read_state, row_states, write_states

from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.transport.messages.messages import TokenLogprobs


class Memory:
    """One value a token and layer: ``values[(block * NUM_LAYERS + layer) * block_size + offset]``."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int = 0,
        repeats: bool = False,
        shift: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """``repeats``: whether the model mostly repeats prompts.
        ``shift``: what an adapter adds to tokens."""
        self._shift = shift
        self.block_size, self.window, self.repeats = block_size, window, repeats
        self.values = [-1 - i for i in range(num_blocks * NUM_LAYERS * block_size)]
        self._sums: list[int | None] = [None] * num_blocks  # known until the block is written again
        self._checksums: list[int | None] = [None] * num_blocks  # likewise

    def read(self, block: int, first: int = 0, end: int = NUM_LAYERS) -> list[int]:
        """Layers [first, end) of a block."""
        size, start = self.block_size, block * NUM_LAYERS
        return self.values[(start + first) * size : (start + end) * size]

    def write(self, block: int, start: int, values: list[int]) -> None:
        """Overwrites a block's values ``start`` and following."""
        first = block * NUM_LAYERS * self.block_size + start
        self.values[first : first + len(values)] = values
        self._sums[block] = self._checksums[block] = None

    def checksum(self, block: int) -> int:
        known = self._checksums[block]
        if known is None:
            size = NUM_LAYERS * self.block_size
            known = self._checksums[block] = (
                hash(tuple(self.values[block * size : (block + 1) * size])) & MASK
            )
        return known

    def execute(self, batch: Batch, token_ids: list[int], from_layer: int = 0) -> StepOutput:
        """The layers from ``from_layer`` on, and what is sampled."""
        if from_layer:
            for layer in range(from_layer, NUM_LAYERS):
                self.write_layer(batch, token_ids, layer)
        else:
            self._write_first(batch, token_ids, NUM_LAYERS)
            self._write_states(batch, token_ids, range(NUM_LAYERS))
        states = [row.written for row in row_states(batch)]
        tokens, logprobs, prompt_logprobs = [], {}, {}
        rows = zip(batch.sampling, batch.block_tables.tolist(), batch.seq_lens.tolist(), strict=True)
        for row, (state, table, length) in enumerate(rows):
            token = -1
            if state is not None:
                repeated = state.prompt_token_ids if self.repeats else ()
                total = self._total(table, length)
                if batch.adapters:
                    total += self._shift(batch.adapters[row])
                if states:
                    total += OF_A_STATE * read_state(self, states[row])
                token = next_token(total, repeated, length)
            tokens.append(token)
            if state is not None and state.params.logprobs is not None:
                logprobs[row] = TokenLogprobs(logprob(token))
            if batch.prompt_logprobs and batch.prompt_logprobs[row] is not None:
                prompt_logprobs[row] = [TokenLogprobs(logprob(token)) for token in batch.next_prompt_ids[row]]
        return StepOutput(np.array(tokens, np.int32), logprobs, prompt_logprobs)

    def write_layer(self, batch: Batch, token_ids: list[int], layer: int) -> None:
        """Writes each token's value of this layer: from the token and its predecessor's in layer 0, from the
        layer below in others."""
        size, values, sums, checksums = self.block_size, self.values, self._sums, self._checksums
        self._write_states(batch, token_ids, range(layer, layer + 1))
        if layer == 0:
            self._write_first(batch, token_ids, 1)
            return
        for slot in batch.slot_mapping.tolist():
            block, offset = divmod(slot, size)
            place = (block * NUM_LAYERS + layer) * size + offset
            values[place] = deeper(values[place - size])
            sums[block] = checksums[block] = None

    def _write_states(self, batch: Batch, token_ids: list[int], layers: range) -> None:
        starts = batch.query_start_loc.tolist()
        for row, states in enumerate(row_states(batch)):
            tokens = self._tokens(batch, token_ids[starts[row] : starts[row + 1]], row)
            write_states(self, states, tokens, layers)

    def _tokens(self, batch: Batch, tokens: list[int], row: int) -> list[int]:
        """Return the tokens of a row as its adapter reads them."""
        if batch.adapters and (shift := self._shift(batch.adapters[row])):
            return [token + shift for token in tokens]
        return tokens

    def _write_first(self, batch: Batch, token_ids: list[int], num_layers: int) -> None:
        """The first ``num_layers`` layers of each token; a token's predecessor has been written when the
        token's turn comes."""
        size, values, sums, checksums, higher = (
            self.block_size,
            self.values,
            self._sums,
            self._checksums,
            range(1, num_layers),
        )
        block_values = NUM_LAYERS * size
        starts, positions, slots = (
            batch.query_start_loc.tolist(),
            batch.positions.tolist(),
            batch.slot_mapping.tolist(),
        )
        for row, table in enumerate(batch.block_tables.tolist()):
            start, end = starts[row], starts[row + 1]
            before = positions[start] - 1
            kv = 0 if before < 0 else values[table[before // size] * block_values + before % size]
            tokens = self._tokens(batch, token_ids[start:end], row)
            for value, slot in zip(first_layer(kv, tokens), slots[start:end], strict=True):
                block, offset = divmod(slot, size)
                sums[block] = checksums[block] = None
                place = block * block_values + offset
                values[place] = value
                for _ in higher:
                    place += size
                    value = values[place] = (3 * value + 7) & MASK  # deeper, written out

    def _total(self, table: list[int], length: int) -> int:
        """The sum of a sequence's values, or of those in its last token's window; a whole block's is kept
        until the block is written again."""
        size, sums = self.block_size, self._sums
        outside = 0
        if self.window and length > self.window:
            behind, offset = divmod(length - self.window, size)
            table, length = table[behind:], length - behind * size
            outside = sum(sum(self.read(table[0], layer, layer + 1)[:offset]) for layer in range(NUM_LAYERS))
        full, rest = divmod(length, size)
        known = [sums[block] for block in table[:full]]
        if None in known:
            for block in table[:full]:
                if sums[block] is None:
                    sums[block] = sum(self.read(block))
            known = [sums[block] for block in table[:full]]
        total: int = sum(known)  # type: ignore[arg-type]
        if rest:
            values, start = self.values, table[full] * NUM_LAYERS * size
            for first in range(start, start + NUM_LAYERS * size, size):
                total += sum(values[first : first + rest])
        return total - outside
