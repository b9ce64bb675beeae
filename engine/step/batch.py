"""The input and output of one step of the model runner, and when a sequence is over. Plain numpy, free of
torch.

A batch is a flat row of tokens; ``query_start_loc`` holds where each sequence's tokens begin. Prefill chunks
and decode rows (one token a sequence) are the same thing. Both may be in one batch, decode rows first:
``Batch.followed_by`` joins them, ``StepOutput.split`` parts their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...transport.messages.images import Image
from ...transport.messages.messages import SamplingParams, TokenLogprobs
from .constraint import TokenMatcher


@dataclass(slots=True)
class SamplingState:
    """One sequence's sampling parameters and the tokens they depend on. The scheduler appends to
    ``output_token_ids`` when it books a step, which may be while the next one runs; the sampler only reads,
    by ``outputs_before``."""

    params: SamplingParams
    prompt_token_ids: Seq[int]
    output_token_ids: list[int]
    matcher: TokenMatcher | None = None
    """Set before the sequence takes part in a step that samples, where ``params`` has a grammar."""
    adapter: str = ""
    """Names the adapter by its content; empty: the model's own weights alone."""
    rope_shift: int = 0
    """The rope position of an output less its index."""
    plain_greedy: bool = field(init=False)
    """Greedy, and nothing else: an argmax will do (min_tokens is looked at separately by the sampler)."""

    def __post_init__(self) -> None:
        p = self.params
        edits = p.has_penalties or p.logit_bias or p.min_tokens or p.grammar
        self.plain_greedy = (p.temperature == 0 or p.top_k == 1) and not edits and p.logprobs is None

    def is_greedy(self, vocab_size: int) -> bool:
        """Whether only the likeliest token can be drawn, of equal ones the lowest: at temperature 0, with
        top_k 1, or where any row's likeliest token alone holds top_p."""
        p = self.params
        return p.temperature == 0 or p.top_k == 1 or p.top_p * vocab_size <= 1

    @property
    def lacks_matcher(self) -> bool:
        """Its grammar is still being compiled."""
        return self.matcher is None and bool(self.params.grammar)

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def num_outputs_before(self, position: int) -> int:
        return position - len(self.prompt_token_ids)

    def outputs_before(self, position: int, newest: int) -> list[int]:
        """The output tokens before ``position``, whether the last of them, ``newest``, is booked yet or
        not."""
        count = self.num_outputs_before(position)
        return [*self.output_token_ids[: count - 1], newest] if count else []


@dataclass(frozen=True, slots=True)
class BatchStates:
    """The states of a batch's sequences, of layers without keys and values: ``StateInputs`` of
    kernels/delta_net.py.

    tables int32 [num_seqs, 3, blocks]
    source int32 [num_seqs]
    marks  int32 [num_seqs]
    """

    tables: NDArray[np.int32]
    source: NDArray[np.int32]
    marks: NDArray[np.int32]

    def followed_by(self, other: BatchStates | None) -> BatchStates:
        assert other is not None, "all sequences of a model have states, or none"
        return BatchStates(
            np.concatenate([self.tables, other.tables]),
            np.concatenate([self.source, other.source]),
            np.concatenate([self.marks, other.marks]),
        )


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Tokens of a batch that stand for an image: ``count``, from the image's ``first`` and the batch's
    ``row`` on. ``skipped``: the image's features before these."""

    image: Image
    row: int
    first: int
    count: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input.

    token_ids       int32 [num_tokens]
    positions       int32 [num_tokens]
    query_start_loc int32 [num_seqs + 1]
    seq_lens        int32 [num_seqs]              KV length of each sequence, this batch's tokens included
    block_tables    int32 [num_seqs, max_blocks]  entries beyond a sequence's last block are undefined
    slot_mapping    int64 [num_tokens]            block * block_size + offset, where each token's K and V go
    sampling        one entry a sequence          None: no logits for its last token
    prompt_logprobs one entry a sequence          n: report logprobs (n alternatives) of *next* prompt tokens
    next_prompt_ids one entry a sequence          for ``prompt_logprobs``: the token after each of the
                                                  chunk's tokens (one fewer if the chunk ends the prompt)
    fed_from        int32 [num_tokens] or None    for a step made while the last one ran: the row of that one
                                                  whose sampled token is the input; -1: in ``token_ids``
    adapters        one entry a sequence, or ()   see ``SamplingState.adapter``; (): none has one
    embeds          one entry a sequence, or ()   tokens whose logits behind its last one are wanted; (): its
                                                  hidden state is; None: nothing
    states          None: no layer has one
    next_ids        int32 [num_seqs] or None      for a model that drafts: the token behind each sequence's
                                                  last one here, -1: the sampled one; None: -1 for all
    draft_of        int32 [num_seqs] or None      the row whose token this row's input drafts; -1: it is none
    num_drafts      int32 [num_seqs] or None      most tokens that the model drafts behind the sampled one
    rope            int32 [num_tokens]            rope positions; with images [3, num_tokens], see
                                                  ``rope_positions``; None: ``positions``
    images          parts of images, in order
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    sampling: Seq[SamplingState | None]
    prompt_logprobs: Seq[int | None] = ()
    next_prompt_ids: Seq[list[int]] = ()
    fed_from: NDArray[np.int32] | None = None
    adapters: Seq[str] = ()
    embeds: Seq[Seq[int] | None] = ()
    states: BatchStates | None = None
    next_ids: NDArray[np.int32] | None = None
    draft_of: NDArray[np.int32] | None = None
    num_drafts: NDArray[np.int32] | None = None
    rope: NDArray[np.int32] | None = None
    images: Seq[ImagePart] = ()

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        """Every sequence runs one token and samples, and nobody asks for a prompt's logprobs."""
        return (
            len(self.token_ids) == len(self.seq_lens)
            and None not in self.sampling
            and (not self.prompt_logprobs or all(count is None for count in self.prompt_logprobs))
        )

    def followed_by(self, chunks: Batch) -> Batch:
        """Return one batch of these decode rows and, behind them, of prefill ``chunks``."""
        num_rows, num_seqs = self.num_seqs, self.num_seqs + chunks.num_seqs
        widths = self.block_tables.shape[1], chunks.block_tables.shape[1]
        tables = np.zeros((num_seqs, max(widths)), np.int32)
        tables[:num_rows, : widths[0]] = self.block_tables
        tables[num_rows:, : widths[1]] = chunks.block_tables
        fed_from = None
        if self.fed_from is not None:
            fed_from = np.full(num_rows + chunks.num_tokens, -1, np.int32)
            fed_from[:num_rows] = self.fed_from
        return Batch(
            token_ids=np.concatenate([self.token_ids, chunks.token_ids]),
            positions=np.concatenate([self.positions, chunks.positions]),
            query_start_loc=np.concatenate([self.query_start_loc, chunks.query_start_loc[1:] + num_rows]),
            seq_lens=np.concatenate([self.seq_lens, chunks.seq_lens]),
            block_tables=tables,
            slot_mapping=np.concatenate([self.slot_mapping, chunks.slot_mapping]),
            sampling=[*self.sampling, *chunks.sampling],
            prompt_logprobs=[*[None] * num_rows, *chunks.prompt_logprobs],
            next_prompt_ids=[*[[]] * num_rows, *chunks.next_prompt_ids],
            fed_from=fed_from,
            adapters=adapters_of(self.adapters or [""] * num_rows, chunks.adapters or [""] * chunks.num_seqs),
            embeds=[*[None] * num_rows, *chunks.embeds],
            states=None if self.states is None else self.states.followed_by(chunks.states),
            next_ids=_with(self.next_ids, chunks.next_ids, num_rows, chunks.num_seqs, none=-1),
            draft_of=_with(self.draft_of, chunks.draft_of, num_rows, chunks.num_seqs, none=-1),
            num_drafts=_with(self.num_drafts, chunks.num_drafts, num_rows, chunks.num_seqs, none=0),
            rope=joined_rope([self, chunks]),
            images=[replace(part, row=part.row + num_rows) for part in chunks.images],
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step's result.

    token_ids       int32 [num_seqs]   the sampled token, -1 where ``sampling`` was None
    logprobs        by row, for the sequences whose params ask for them
    prompt_logprobs by row, for the sequences that ask for them: one entry per token of ``next_prompt_ids``
    embeddings      by row, where ``embeds``: float32 [hidden_size], the hidden state behind the last norm, or
                    [n], the logits of n tokens
    drafts          by row, where its input was right: at most ``num_drafts`` tokens behind the sampled one
    """

    token_ids: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)

    def split(self, num_rows: int) -> tuple[StepOutput, StepOutput]:
        """Return the outputs of the first ``num_rows`` sequences and of the others, each with rows of its
        own."""
        return (
            StepOutput(
                self.token_ids[:num_rows],
                {row: entry for row, entry in self.logprobs.items() if row < num_rows},
                {row: entries for row, entries in self.prompt_logprobs.items() if row < num_rows},
                {row: vector for row, vector in self.embeddings.items() if row < num_rows},
                self.drafts,  # of decode rows alone
            ),
            StepOutput(
                self.token_ids[num_rows:],
                {row - num_rows: entry for row, entry in self.logprobs.items() if row >= num_rows},
                {row - num_rows: entries for row, entries in self.prompt_logprobs.items() if row >= num_rows},
                {row - num_rows: vector for row, vector in self.embeddings.items() if row >= num_rows},
            ),
        )


def _with(
    first: NDArray[np.int32] | None, second: NDArray[np.int32] | None, *lengths: int, none: int
) -> NDArray[np.int32] | None:
    """Return both, one behind the other; ``none`` fills a missing column."""
    if first is None and second is None:
        return None
    parts = zip((first, second), lengths, strict=True)
    return np.concatenate([np.full(n, none, np.int32) if part is None else part for part, n in parts])


def joined_rope(batches: Seq[Batch]) -> NDArray[np.int32] | None:
    """Return ``Batch.rope`` of the tokens of these batches, one behind the other."""
    if all(batch.rope is None for batch in batches):
        return None
    parts = [batch.positions if batch.rope is None else batch.rope for batch in batches]
    if len({part.ndim for part in parts}) > 1:
        parts = [np.broadcast_to(part, (3, part.shape[-1])) for part in parts]
    return np.concatenate(parts, axis=-1)


def adapters_of(*names: Seq[str]) -> Seq[str]:
    """Return ``Batch.adapters`` of the sequences with these, one after the other."""
    joined = [name for part in names for name in part]
    return joined if any(joined) else ()


def last_output_index(state: SamplingState, max_model_len: int) -> int:
    """The output index of the last token that this sequence may have: by ``max_tokens`` or by the model's
    context."""
    return min(state.params.max_tokens, max_model_len - len(state.prompt_token_ids)) - 1


def stop_set(state: SamplingState, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end this sequence."""
    stops = frozenset(state.params.stop_token_ids)
    return stops if state.params.ignore_eos else stops | eos_token_ids


def finish_reason(
    token: int, index: int, stops: frozenset[int], min_tokens: int, last_index: int
) -> Literal["stop", "length"] | None:
    """Whether output token ``token`` at output index ``index`` ends its sequence. The end token itself is
    reported too."""
    if token in stops and index + 1 > min_tokens:
        return "stop"
    return "length" if index >= last_index else None
