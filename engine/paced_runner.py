"""A model runner that takes a profile's time and computes nothing, to rehearse a cluster on a laptop.

Everything around it is real: cores, sockets, KV movers, the coordinator. Its tokens mean nothing, but they
are a function of (seed, position) as real ones are, so that a request tried again goes on as it began. End
tokens are never drawn: a request ends by its length.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..transport.messages.cache_map import states
from ..transport.messages.messages import ModelIdentity, TokenLogprobs
from .cache.kv_cache import PoolAllocator
from .latency_profile import PACED, Profile, ProfileError
from .model.config import ModelConfig
from .settings import WorkerSettings
from .step.batch import Batch, SamplingState, StepOutput
from .step_clock import StepClock
from .worker_model import WorkerModel

SLICES = 8
"""Groups of layers that a step reports: each costs a wake-up."""
FOLLOWS_S = 0.01
"""A step that begins so soon after the last was waiting for it; after a longer pause there is nothing to make
up for."""
DEFAULT_CACHE_GIB = 1 / 16


class PacedRunner:
    """``noise``: draws how many times its modelled time a step takes."""

    def __init__(
        self,
        profile: Profile,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        noise: random.Random,
        hidden_size: int = 1,
    ) -> None:
        self.clock = StepClock(profile)
        self._vocab_size, self._eos, self._hidden_size = vocab_size, eos_token_ids, hidden_size
        self._num_layers = profile.memory.num_layers
        self._noise, self._sigma = noise, math.sqrt(math.log1p(profile.noise_cv**2))
        self._late_s = 0.0  # seconds that the last step overslept; subtracted from one that follows at once
        self._ended = float("-inf")

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """Returns when the step is over."""
        began, seconds = time.monotonic(), self.clock.batch(batch) * self._factor()
        late_s = self._late_s if began - self._ended < FOLLOWS_S else 0.0
        due = began + max(0.0, seconds - late_s)
        if on_layer is not None:
            self._report_layers(began, due, on_layer)
        _sleep_until(due)
        self._ended = time.monotonic()
        self._late_s = min(self._ended - due, seconds)
        return self._output(batch)

    def _factor(self) -> float:
        return math.exp(self._noise.gauss(-(self._sigma**2) / 2, self._sigma)) if self._sigma else 1.0

    def _report_layers(self, began: float, due: float, on_layer: Callable[[int], None]) -> None:
        done = 0
        for i in range(1, SLICES + 1):
            reached = self._num_layers * i // SLICES
            _sleep_until(began + (due - began) * reached / self._num_layers)
            for layer in range(done + 1, reached + 1):
                on_layer(layer)
            done = reached

    def _output(self, batch: Batch) -> StepOutput:
        rows = zip(batch.sampling, batch.seq_lens.tolist(), strict=True)
        token_ids = np.array(
            [-1 if state is None else self._token(state, position) for state, position in rows], np.int32
        )
        logprobs = {
            row: TokenLogprobs(0.0)
            for row, s in enumerate(batch.sampling)
            if s is not None and s.params.logprobs is not None
        }
        asked = [row for row, count in enumerate(batch.prompt_logprobs) if count is not None]
        return StepOutput(
            token_ids,
            logprobs,
            {row: [TokenLogprobs(0.0)] * len(batch.next_prompt_ids[row]) for row in asked},
            {
                row: np.ones(len(wanted) or self._hidden_size, np.float32)
                for row, wanted in enumerate(batch.embeds)
                if wanted is not None
            },
        )

    def _token(self, state: SamplingState, position: int) -> int:
        token = (state.params.seed + 31 * position) % self._vocab_size
        while token in self._eos or token in state.params.stop_token_ids:
            token = (token + 1) % self._vocab_size
        return token


def paced_model(settings: WorkerSettings, allocate: PoolAllocator | None = None) -> WorkerModel:
    """What a worker serves with ``--runner paced:FILE``. Blocks are as many as the profile's worker has, and
    as large, or cut down so that all fit into ``kv_cache_gib`` (default: 1/16). Raises ProfileError."""
    profile = Profile.read(Path(settings.runner.removeprefix(PACED)))
    memory, config = profile.memory, ModelConfig.from_folder(settings.model)
    if settings.block_size not in (0, memory.block_size):
        raise ProfileError(
            f"the profile {profile.name} was made with blocks of {memory.block_size} tokens: give "
            "--block-size 0"
        )
    max_model_len = settings.max_model_len or memory.max_model_len
    if max_model_len > memory.max_model_len:
        raise ProfileError(
            f"--max-model-len {max_model_len} is more than the {memory.max_model_len} of the profile "
            f"{profile.name}"
        )
    num_blocks = settings.num_blocks or memory.num_blocks
    layer_bytes = _layer_bytes(profile, num_blocks, settings.kv_cache_gib or DEFAULT_CACHE_GIB)
    shape = (num_blocks, memory.num_layers, layer_bytes)
    pool = (
        np.zeros(shape, np.uint8)
        if allocate is None
        else np.frombuffer(allocate(math.prod(shape)), np.uint8, math.prod(shape))
    )
    eos = frozenset(config.eos_token_ids)
    return WorkerModel(
        runner=PacedRunner(
            profile, config.vocab_size, eos, random.Random(settings.worker_id), config.hidden_size
        ),
        pool=pool.reshape(shape),
        identity=ModelIdentity(
            dtype="uint8",
            kv_name=f"paced {profile.name}",
            block_size=memory.block_size,
            cache_map=states(memory.num_layers, layer_bytes),
            block_bytes=memory.num_layers * layer_bytes,
        ),
        eos_token_ids=eos,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        takes_images=True,
    )


def _layer_bytes(profile: Profile, num_blocks: int, cache_gib: float) -> int:
    real = -(-profile.memory.block_bytes // profile.memory.num_layers)
    room = int(cache_gib * 2**30) // (num_blocks * profile.memory.num_layers)
    return max(8, min(real, room) // 8 * 8)


def _sleep_until(due: float) -> None:
    while (left := due - time.monotonic()) > 0:
        time.sleep(left)
