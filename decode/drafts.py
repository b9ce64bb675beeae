"""Drafts: the next tokens of a sequence, guessed. Pure.

A draft is a hint, and changes no token. Each drafted token is one more row of the step: the model's input at
the next position, sampled with that position's own noise. It counts if the row before has sampled it. There
are two sources of drafts; both are measured by the tokens that come, with rows or without:

    text   prompt lookup: what followed the newest tokens before may follow them again (text_match.py)
    model  its prediction layer, which is asked a step before (model_drafts.py)

Of both the one with more right tokens to expect drafts a sequence.

    time of a step of m rows  ~ cheap_rows + m
    a token that is asked of the model  ~ DRAFT_LAYERS of its layers, for all sequences in a pass

The next row goes to the likeliest drafted token as long as that raises tokens / time. A step whose drafts
promise less than LEAST_GAIN has none, asks for none, and is made ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ..engine.cache.block_manager import BlockManager
from .model_drafts import ModelDrafts
from .rows import NO_DRAFTS, DecodeResult, DecodeRows, StepDrafts
from .sequences import DecodeSequence
from .text_match import TextMatch

CHEAP_ROWS = {"cpu": 8, "cuda": 64}
"""Rows of a step that take little longer than one: the weights are read once for all."""
LEAST_GAIN = 1.1  # such a step waits for the tokens of the one before
DRAFT_LAYERS = 3
"""Layers of a model that read as much as its prediction layer and its head: by the published configurations
a head is 1.5 (DeepSeek-V3) to 2.4 (GLM-4.5-Air) of a layer's active weights."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """At most ``most`` drafted tokens of a sequence, each right in ``rate`` of all cases if those before it
    are; ``cost`` of each, in rows."""

    sequence: DecodeSequence
    rate: float
    most: int
    cost: float = 1.0
    by_model: bool = False

    @property
    def expected(self) -> float:
        return sum(self.rate**i for i in range(1, self.most + 1))

    def draft(self, count: int) -> list[int]:
        """The next ``count`` tokens by the text, or fewer."""
        assert self.sequence.match is not None, "it is planned"
        return self.sequence.match.draft(count, self.sequence.stops)


class Drafts:
    """Decides how many tokens to draft for each sequence, and by which source."""

    def __init__(self, num_tokens: int, cheap_rows: int, draft_cost: float = 0.0) -> None:
        """``num_tokens``: most of a sequence in a step; 0: none. ``draft_cost``: of a token that the model
        drafts, as a share of a step's time; 0: it drafts none."""
        self._num_tokens, self._cheap_rows, self._draft_cost = num_tokens, cheap_rows, draft_cost

    def pay(self, sequences: Sequence[DecodeSequence], most_rows: int) -> bool:
        """Whether the next step is to have drafts, or to ask for some, by the tokens that are known."""
        return bool(self._plan(sequences, most_rows) or self._ask(sequences, most_rows))

    def draft(self, rows: DecodeRows, blocks: BlockManager, most: int) -> StepDrafts:
        """Draft for a step of ``most`` rows. Tokens get a block where that leaves one for each row. What the
        model has drafted is used in this step or dropped."""
        if not self._num_tokens:
            return NO_DRAFTS
        plan, asked = self._plan(rows.sequences, most), self._ask(rows.sequences, most)
        made = {
            sequence: tokens
            for sequence in rows.sequences
            if (own := sequence.model_drafts) is not None and (tokens := own.take())
        }
        drafts, by_model = {}, []
        for source, count in plan.items():
            sequence = source.sequence
            tokens = made[sequence][:count] if source.by_model else source.draft(count)
            position = sequence.state.position  # of the first of them
            while position + len(tokens) > len(sequence.blocks) * rows.block_size:
                if blocks.num_available <= len(rows.sequences) or (more := blocks.allocate(1)) is None:
                    tokens = tokens[: len(sequence.blocks) * rows.block_size - position]
                    break
                rows.add_block(sequence, more[0])
            if tokens:
                drafts[sequence] = tokens
                by_model += [sequence] if source.by_model else []
        return StepDrafts(drafts, frozenset(by_model), made, asked)

    def book(self, result: DecodeResult) -> None:
        """A step is booked: measure what the model had drafted before it, and keep what it has drafted behind
        each sequence's newest token."""
        step = result.step
        for sequence, tokens in step.drafts.made.items():
            if sequence.model_drafts is not None:
                sequence.model_drafts.measure(tokens, sequence.state.output_token_ids)
        for row, tokens in result.output.drafts.items():
            sequence = step.sequences[row]
            num_outputs, own = len(sequence.state.output_token_ids), sequence.model_drafts
            is_newest = row not in result.dropped and step.indices[row] == num_outputs - 1
            if is_newest and own is not None and not (sequence.ended or sequence.paused):
                own.keep(_before(tokens, sequence.stops), num_outputs)

    def _plan(self, sequences: Sequence[DecodeSequence], most_rows: int) -> dict[_Source, int]:
        """Return the number of tokens that are drafts of the next step, by source."""
        if not (room := self._room(len(sequences), most_rows)):
            return {}
        if (new := next(filter(_lacks_match, sequences), None)) is not None:  # one: it takes milliseconds
            new.match = TextMatch(new.state)
        return self._choose(list(self._sources(sequences)), len(sequences), room)

    def _ask(self, sequences: Sequence[DecodeSequence], most_rows: int) -> dict[DecodeSequence, int]:
        """Return how many tokens the model is to draft in the next step, for the one behind it."""
        num_seqs = len(sequences)
        if not self._draft_cost or not (room := self._room(num_seqs, most_rows)):
            return {}
        for sequence in sequences:
            if sequence.model_drafts is None and _may_draft(sequence):
                sequence.model_drafts = ModelDrafts(len(sequence.state.output_token_ids))
        cost = 1 + self._draft_cost * (self._cheap_rows + num_seqs) / num_seqs
        chosen = self._choose(list(self._sources(sequences, cost)), num_seqs, room)
        return {source.sequence: count for source, count in chosen.items() if source.by_model}

    def _room(self, num_seqs: int, most_rows: int) -> int:
        """Return how many drafted tokens a step may have: 0 where too little is gained if all are right."""
        cheap, num_rows = self._cheap_rows, min(most_rows, self._cheap_rows)
        if not self._num_tokens or not 0 < num_seqs < num_rows:
            return 0
        gain = num_rows / num_seqs * (cheap + num_seqs) / (cheap + num_rows)
        return num_rows - num_seqs if gain >= LEAST_GAIN else 0

    def _sources(self, sequences: Sequence[DecodeSequence], cost: float = 0.0) -> Iterator[_Source]:
        """Yield the better source of each sequence that has one. ``cost``: of a token that is asked of the
        model, in rows; 0: only what it has drafted counts."""
        for sequence in sequences:
            match, own = sequence.match, sequence.model_drafts
            num_outputs = len(sequence.state.output_token_ids)
            most = min(self._num_tokens, sequence.last_index - num_outputs - (cost > 0))
            sources = []
            if match is not None and match.read():
                sources.append(_Source(sequence, match.rate, most))
            if own is not None and (cost or own.tokens):
                drafted = most if cost else min(most, len(own.tokens))
                sources.append(_Source(sequence, own.rate(num_outputs), drafted, cost or 1.0, by_model=True))
            if sources:
                yield max(sources, key=lambda source: source.expected)

    def _choose(self, sources: Sequence[_Source], num_seqs: int, room: int) -> dict[_Source, int]:
        """Return how many tokens of each to draft; none where that gains too little."""
        choices = [(source.rate**i, source) for source in sources for i in range(1, source.most + 1)]
        choices.sort(key=lambda choice: -choice[0] / choice[1].cost)
        time = alone = float(self._cheap_rows + num_seqs)
        expected, counts = float(num_seqs), dict[_Source, int]()
        for chance, source in choices[:room]:
            if chance * time <= expected * source.cost:
                break
            time, expected = time + source.cost, expected + chance
            counts[source] = counts.get(source, 0) + 1
        return counts if expected / num_seqs * alone / time >= LEAST_GAIN else {}


def _lacks_match(sequence: DecodeSequence) -> bool:
    return sequence.match is None and _may_draft(sequence)


def _before(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """A token that ends the answer is no draft: nothing may follow it."""
    return list(takewhile(lambda token: token not in stops, tokens))


def _may_draft(sequence: DecodeSequence) -> bool:
    """None has one whose next token depends on more than text and position."""
    params = sequence.state.params
    return not (params.has_penalties or params.grammar)
