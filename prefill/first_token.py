"""What a computed prompt yields: its first token, or the logprobs of the prompt itself. Pure."""

from __future__ import annotations

from ..engine.step.stopping import finish_reason, last_output_index, stop_set
from ..transport.handoff.protocol import Key
from ..transport.messages.messages import FinishReason, FirstToken, TokenLogprobs
from .scheduler import PrefillSequence


class FirstTokens:
    """Keeps the prompts' own logprobs, chunk by chunk, until their first tokens are reported."""

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self._eos, self._max_model_len = eos_token_ids, max_model_len
        self._prompt_logprobs: dict[Key, list[TokenLogprobs]] = {}

    def gather(self, key: Key, logprobs: list[TokenLogprobs]) -> None:
        """Keep the logprobs of the prompt's next chunk, one entry for each position."""
        self._prompt_logprobs.setdefault(key, []).extend(logprobs)

    def may_be_followed(self, sequence: PrefillSequence) -> bool:
        """Whether its length allows a second token."""
        return last_output_index(sequence.state, self._max_model_len) > len(sequence.state.output_token_ids)

    def report(
        self, sequence: PrefillSequence, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> FirstToken:
        """The whole prompt has been computed."""
        index = len(sequence.state.output_token_ids)
        prompt_logprobs = self._prompt_logprobs.pop(sequence.key, None)
        return FirstToken(
            coordinator=sequence.key[0],
            dispatch=sequence.key[1],
            index=index,
            token=None if sequence.scores_only else token,
            logprobs=logprobs,
            prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs is not None else None,
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=max(0.0, sequence.started - sequence.arrival),
            prefill_s=max(0.0, now - sequence.started),
            finished=self._finish_reason(sequence, token, index),
        )

    def forget(self, key: Key) -> None:
        """Nobody wants it any more."""
        self._prompt_logprobs.pop(key, None)

    def _finish_reason(self, sequence: PrefillSequence, token: int, index: int) -> FinishReason | None:
        state = sequence.state
        if sequence.scores_only:
            return "length"
        last = last_output_index(state, self._max_model_len)
        return finish_reason(token, index, stop_set(state, self._eos), state.params.min_tokens, last)
