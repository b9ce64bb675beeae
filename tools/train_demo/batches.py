"""Token rows for training: conversations cut to a fixed length, with a weight for the loss on every token."""

import torch
from tokenizers import Tokenizer
from torch import Tensor
from train_demo.conversations import HELD_OUT_PHRASINGS, ConversationSampler
from train_demo.tokenizer import ASSISTANT, END_OF_TEXT, END_OF_TURN, SYSTEM, USER

QUESTION_LOSS = 0.1  # against 1 for the tokens of an answer
PLAIN_SHARE = 0.03  # rows of bare sentences, so that /v1/completions has something to continue
Row = tuple[list[int], list[float]]


class BatchSource:
    """Endless batches for one training process; processes with different seeds see different
    conversations."""

    def __init__(self, tokenizer: Tokenizer, seed: int, weight_power: float = 1.0) -> None:
        self._tokenizer = tokenizer
        self._sampler = ConversationSampler(seed, weight_power)
        self._ids: dict[str, list[int]] = {}
        self._rows = 0

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets, int64 [rows, length], and the targets' loss weights, float32 [rows, length]."""
        drawn = [self._row(length + 1) for _ in range(rows)]
        tokens = torch.tensor([ids for ids, _ in drawn])
        weights = torch.tensor([row_weights for _, row_weights in drawn])
        return tokens[:, :-1], tokens[:, 1:], weights[:, 1:]

    def _row(self, length: int) -> Row:
        ids: list[int] = []
        weights: list[float] = []
        self._rows += 1
        plain = self._rows % round(1 / PLAIN_SHARE) == 0
        while len(ids) < length:
            system, turns = self._sampler.conversation()
            if system and not plain:
                self._add(ids, weights, SYSTEM + system + END_OF_TURN, 0.0)
            for turn in turns:
                if plain:
                    self._add(ids, weights, END_OF_TEXT + turn.answer, 0.5)
                else:
                    self._add(ids, weights, USER + turn.question + END_OF_TURN + ASSISTANT, QUESTION_LOSS)
                    self._add(ids, weights, turn.answer + END_OF_TURN, 1.0)
        return ids[:length], weights[:length]

    def _add(self, ids: list[int], weights: list[float], text: str, weight: float) -> None:
        if text not in self._ids:
            self._ids[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids += self._ids[text]
        weights += [weight] * len(self._ids[text])


def held_out(tokenizer: Tokenizer, facts: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Single turns about evenly picked facts, asked in phrasings that training never uses; shapes as
    batch()."""
    all_facts = sorted(ConversationSampler(0).facts, key=lambda fact: -fact.weight)[:900]
    picked = all_facts[:: len(all_facts) // facts][:facts]
    pad = tokenizer.token_to_id(END_OF_TEXT)
    assert pad is not None
    tokens = torch.full((len(picked), length + 1), pad)
    weights = torch.zeros(len(picked), length + 1)
    for row, fact in enumerate(picked):
        question = HELD_OUT_PHRASINGS[row % len(HELD_OUT_PHRASINGS)].format(n=fact.names[0])
        prompt = tokenizer.encode(USER + question + END_OF_TURN + ASSISTANT, add_special_tokens=False).ids
        ids = (prompt + tokenizer.encode(fact.answer + END_OF_TURN, add_special_tokens=False).ids)[
            : length + 1
        ]
        tokens[row, : len(ids)] = torch.tensor(ids)
        weights[row, len(prompt) : len(ids)] = 1.0
    return tokens[:, :-1], tokens[:, 1:], weights[:, 1:]
