"""What clients ask for."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace
from simulation.model import VOCABULARY
from simulation.worker_process import BLOCK_SIZE, MAX_MODEL_LEN
from simulation.worker_role import BAD_GRAMMAR

from splitserve.transport.messages.messages import SamplingParams

if TYPE_CHECKING:
    from simulation.world import World

TOKENS = range(1, VOCABULARY)
SHARED, OWN = (0, 0, 8, 16, 32), (2, 5, 9, 24)
"""Tokens of a prompt that others begin with too, and those of its own."""
MAX_TOKENS = (1, 2, 2, 4, 6, 24)


class Wishes:
    """Draws prompts and samplings."""

    def __init__(self, world: World, random: Random) -> None:
        self.world, self.random = world, random
        self._system_prompts = [self.random.choices(TOKENS, k=max(SHARED)) for _ in range(3)]
        self._recent_prompts = self._system_prompts.copy()

    def prompt(self) -> list[int]:
        """Draw a prompt: the beginning of a system prompt or of a recent prompt, then tokens of its own."""
        draw = self.random
        known = draw.choice(self._system_prompts if draw.random() < 0.5 else self._recent_prompts)
        prompt = known[: draw.choice(SHARED)] + draw.choices(TOKENS, k=draw.choice(OWN))
        self._recent_prompts[draw.randrange(len(self._recent_prompts))] = prompt
        return prompt

    def sampling(self) -> tuple[SamplingParams, int | None]:
        draw = self.random
        max_tokens = draw.choice(MAX_TOKENS)
        if self.world.scenario.cluster.drafts:
            max_tokens = min(3 * max_tokens, self._most_tokens - max(SHARED) - max(OWN))
        prompt_logprobs = 0 if draw.random() < 0.03 else None
        if prompt_logprobs is not None and draw.random() < 0.3:
            max_tokens = 0
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw.choice((0, 0, 0, 3)),
            temperature=0.0,
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=(draw.randrange(VOCABULARY),),
            logprobs=draw.choice((None, None, None, None, 0)),
        )
        return sampling, prompt_logprobs

    def odd(
        self, draw: Random, prompt: list[int], sampling: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        """Give one a grammar or a length at an edge: a token, whole blocks, a prompt that is cached as it
        stands, all that the workers hold."""
        kind, longest = draw.randrange(6), self._most_tokens
        if kind < 2:
            return prompt, replace(sampling, grammar=draw.choice((b"good", b"good", b"good", BAD_GRAMMAR)))
        if kind == 2:
            return prompt[:1], sampling
        if kind == 3:
            return (prompt * BLOCK_SIZE)[: BLOCK_SIZE * draw.randint(1, 10)], sampling
        if kind == 4:
            return draw.choice(self._recent_prompts), sampling
        prompt = draw.choices(TOKENS, k=draw.choice((1, longest // 2, longest - 2, longest - 1)))
        return prompt, replace(sampling, max_tokens=longest - len(prompt))

    def long_answer(self) -> SamplingParams:
        return SamplingParams(max_tokens=self._most_tokens, temperature=0.0, ignore_eos=True)

    @property
    def _most_tokens(self) -> int:
        """Tokens of the longest sequence. Between two roles of a process a block is there twice, and so are
        both copies of a state."""
        cluster = self.world.scenario.cluster
        states, is_mixed = 2 * cluster.state_blocks, bool(cluster.num_mixed or cluster.num_borrowing)
        num_blocks = min(cluster.prefill_blocks, cluster.decode_blocks) - states - (1 + states) * is_mixed
        return min(MAX_MODEL_LEN - BLOCK_SIZE * is_mixed, BLOCK_SIZE * num_blocks)
