"""What a prefill worker reports: its load, the changes of its prefix cache, and what each computed prompt
yields. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..engine.cache.block_manager import has_spare
from ..engine.step.batch import finish_reason, last_output_index, stop_set
from ..transport.handoff.protocol import Key
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.handoff.sender import HandoffSender
from ..transport.messages.messages import FinishReason, FirstToken, Load, PeerId, TokenLogprobs, u32
from ..transport.process.reports import CacheReporter
from .chunks import PrefillSequence, PrefillStep
from .prefix_waits import PrefixWaits
from .prompt_blocks import tables
from .scheduler import PrefillScheduler
from .stored_prefixes import StoredPrefixes


class Heartbeat:
    """Counts steps; reads everything else from the scheduler and the handoff."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        sender: HandoffSender,
        receiver: HandoffReceiver,
        waits: PrefixWaits,
        stored: StoredPrefixes,
    ) -> None:
        self._scheduler, self._sender, self._receiver = scheduler, sender, receiver
        self._waits, self._stored = waits, stored
        self.cache = CacheReporter(scheduler.blocks)
        self._num_steps = 0
        self._num_step_sequences = 0
        self._num_first_tokens = 0
        self._num_full_step_tokens = 0
        self._full_step_s = self._last_step_at = 0.0
        self._largest_batch = self._largest_batch_tokens = 0

    def count_step(self, step: PrefillStep, now: float) -> None:
        """Count a step that has run. Steps run one after the other."""
        seconds, self._last_step_at = max(0.0, now - max(step.made_at, self._last_step_at)), now
        self._num_steps += 1
        self._num_step_sequences += len(step.chunks)
        self._largest_batch = max(self._largest_batch, len(step.chunks))
        self._largest_batch_tokens = max(self._largest_batch_tokens, step.batch.num_tokens)
        if step.is_full:
            self._num_full_step_tokens += step.batch.num_tokens
            self._full_step_s += seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens a second of full steps; None: there was none."""
        return self._num_full_step_tokens / self._full_step_s if self._full_step_s else None

    def count_first_token(self) -> None:
        """One more prompt has yielded its first token."""
        self._num_first_tokens += 1

    def load(self, worker: PeerId, held: Sequence[Key], draining: bool, coordinator: int | None) -> Load:
        """Return the load for one of several coordinators; None: for the only one. ``held``: every dispatch
        with anything here."""
        s, b = self._scheduler, self._scheduler.blocks
        own = [dispatch for owner, dispatch in held if coordinator is None or owner == coordinator]
        return Load(
            worker_id=worker[0],
            incarnation=worker[1],
            blocks_free=b.num_free,
            blocks_cached=b.num_cached,
            blocks_used=b.num_used,
            blocks_leased=self._receiver.leases.num_blocks
            + sum(len(blocks) for sequence in s.pinned.values() for blocks in tables(sequence)),
            num_running=len(s.running),
            num_waiting=len(s.waiting),
            num_waiting_tokens=s.num_waiting_tokens(),
            steps=self._num_steps,
            busy=any(
                not (x.state.lacks_matcher or x.prefix_by) for x in (*s.waiting.values(), *s.running.values())
            ),
            accepting=has_spare(b.num_available, b.num_blocks),
            draining=draining,
            dispatches=u32(own),
            num_others=len(held) - len(own),
            num_others_tokens=s.num_waiting_tokens(but_of=coordinator)
            if len(held) > len(own) and coordinator is not None
            else 0,
            num_cache_reports=self.cache.num_reports,
            counters={
                "prompt_tokens": s.num_prompt_tokens,
                "output_tokens": self._num_first_tokens,
                "step_sequences": self._num_step_sequences,
                "cached_tokens": s.num_cached_tokens,
                "pulled_tokens": self._receiver.leases.num_prefix_blocks * s.block_size,
                "late_pulls": self._waits.num_late,
                "loaded_tokens": self._stored.num_tokens,
                "late_loads": self._stored.waits.num_late,
                "corrupt_blocks": self._receiver.num_corrupt_blocks,
                "mover_fallbacks": self._sender.num_fallbacks,
                "full_step_tokens": self._num_full_step_tokens,
                "full_step_seconds": self._full_step_s,
            },
            gauges={"largest_batch": self._largest_batch, "largest_batch_tokens": self._largest_batch_tokens},
        )


class FirstTokens:
    """What a computed prompt yields: its first token, its embedding, or the logprobs of the prompt itself.
    Those are kept, chunk by chunk, until the first token is reported."""

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
        self,
        sequence: PrefillSequence,
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        embedding: NDArray[np.float32] | None = None,
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
            embedding=b"" if embedding is None else embedding.tobytes(),
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
