"""Prompt lookup: finds the newest tokens of a sequence where its own text had them before. Pure."""

from __future__ import annotations

import numpy as np

from ..engine.step.batch import SamplingState
from ..transport.messages.images import FIRST_IMAGE_ID

NUM_MATCHED = 3  # tokens
MOST_READ = 32  # tokens of a sequence in a call, which the whole batch waits for
FIRST_RATE, WEIGHT = 0.5, 1 / 8
BITS = 21  # of a token id
KEY_MASK = (1 << NUM_MATCHED * BITS) - 1


class TextMatch:
    """Finds repetitions in one sequence's text: of the prompt n-grams are sorted, of the output hashed."""

    def __init__(self, state: SamplingState) -> None:
        self._prompt, self._output = state.prompt_token_ids, state.output_token_ids
        tokens = np.array(self._prompt, np.int64)
        keys = tokens[NUM_MATCHED - 1 :].copy()
        for back in range(1, NUM_MATCHED):
            keys |= tokens[NUM_MATCHED - 1 - back : len(tokens) - back] << back * BITS
        self._order = np.argsort(keys, kind="stable").astype(np.int32)
        self._keys = keys[self._order]
        self._behind: dict[int, int] = {}  # where the token behind an n-gram of the output stands
        self._key = 0
        for token in self._prompt[-NUM_MATCHED:]:
            self._key = self._key << BITS | token
        self._num_read, self._next = len(self._prompt), -1
        self.rate = FIRST_RATE  # of predicted tokens, those that came

    def read(self) -> bool:
        """Read on in the output. Return whether all is read, and the text matches now."""
        for token in self._output[self._num_read - len(self._prompt) :][:MOST_READ]:
            self._num_read += 1
            if self._next >= 0:
                hit = self._token(self._next) == token
                self.rate += (hit - self.rate) * WEIGHT
                self._next = self._next + 1 if hit else -1
            self._key = key = (self._key << BITS | token) & KEY_MASK
            if self._next < 0:
                self._next = self._behind.get(key) or self._find_in_prompt(key)
            self._behind[key] = self._num_read
        return self._next >= 0 and self._num_read == len(self._prompt) + len(self._output)

    def draft(self, count: int, stops: frozenset[int]) -> list[int]:
        """The next ``count`` tokens, by the match; fewer before one of ``stops`` or an image. A match that
        reaches the text's end goes on with the draft."""
        tokens: list[int] = []
        for at in range(self._next, self._next + count):
            token = self._token(at) if at < self._num_read else tokens[at - self._num_read]
            if token in stops or token >= FIRST_IMAGE_ID:
                break
            tokens.append(token)
        return tokens

    def _token(self, at: int) -> int:
        num_prompt = len(self._prompt)
        return self._prompt[at] if at < num_prompt else self._output[at - num_prompt]

    def _find_in_prompt(self, key: int) -> int:
        at = int(self._keys.searchsorted(key, "right")) - 1
        return int(self._order[at]) + NUM_MATCHED if at >= 0 and self._keys[at] == key else -1
