"""Drafts by prompt lookup: what followed a sequence's newest tokens before may follow them again. Pure.

A draft is a hint, and changes no token. Each drafted token is one more row of the step: the model's input at
the next position, sampled with that position's own noise. It counts if the row before has sampled it. Matches
are followed without rows, too: so a sequence's rate of hits is known before it has any.

    time of a step of m rows ~ cheap_rows + m

The next row goes to the likeliest drafted token as long as that raises tokens / time. A step whose drafts
promise less than LEAST_GAIN has none, and is made ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.cache.block_manager import BlockManager
from .rows import DecodeRows
from .sequences import DecodeSequence
from .text_match import TextMatch

CHEAP_ROWS = {"cpu": 8, "cuda": 64}
"""Rows of a step that take little longer than one: the weights are read once for all."""
LEAST_GAIN = 1.1  # such a step waits for the tokens of the one before


class Drafts:
    """Decides how many tokens to draft for each sequence."""

    def __init__(self, num_tokens: int, cheap_rows: int) -> None:
        """``num_tokens``: most of a sequence in a step; 0: none."""
        self._num_tokens, self._cheap_rows = num_tokens, cheap_rows

    def plan(self, sequences: Sequence[DecodeSequence], most_rows: int) -> dict[DecodeSequence, int]:
        """Return the number of tokens to draft for each sequence, by the tokens that are known."""
        num_seqs, num_rows = len(sequences), min(most_rows, self._cheap_rows)
        if not self._num_tokens or not 0 < num_seqs < num_rows:
            return {}
        choices = []
        if (new := next(filter(_lacks_match, sequences), None)) is not None:  # one: it takes milliseconds
            new.match = TextMatch(new.state)
        for sequence in sequences:
            if (match := sequence.match) is None or not match.read():
                continue
            left = sequence.last_index - len(sequence.state.output_token_ids)
            choices += [(match.rate**i, sequence) for i in range(1, min(self._num_tokens, left) + 1)]
        choices.sort(key=lambda choice: -choice[0])
        rows, expected, counts = num_seqs, float(num_seqs), dict[DecodeSequence, int]()
        for chance, sequence in choices[: num_rows - num_seqs]:
            if chance * (self._cheap_rows + rows) <= expected:
                break
            rows, expected = rows + 1, expected + chance
            counts[sequence] = counts.get(sequence, 0) + 1
        gain = expected / num_seqs * (self._cheap_rows + num_seqs) / (self._cheap_rows + rows)
        return counts if gain >= LEAST_GAIN else {}

    def draft(self, rows: DecodeRows, blocks: BlockManager, most: int) -> dict[DecodeSequence, list[int]]:
        """Draft for a step of ``most`` rows. Tokens get a block where that leaves one for each row."""
        drafts = {}
        for sequence, count in self.plan(rows.sequences, most).items():
            assert sequence.match is not None, "it is planned"
            tokens = sequence.match.draft(count, sequence.stops)
            position = sequence.state.position  # of the first of them
            while position + len(tokens) > len(sequence.blocks) * rows.block_size:
                if blocks.num_available <= len(rows.sequences) or (more := blocks.allocate(1)) is None:
                    tokens = tokens[: len(sequence.blocks) * rows.block_size - position]
                    break
                rows.add_block(sequence, more[0])
            if tokens:
                drafts[sequence] = tokens
        return drafts


def _lacks_match(sequence: DecodeSequence) -> bool:
    """None has one whose next token depends on more than text and position."""
    params = sequence.state.params
    return sequence.match is None and not (params.has_penalties or params.grammar)
