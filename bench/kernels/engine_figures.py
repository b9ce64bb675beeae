"""How fast whole models run on a GPU, each beside its floor: decode steps and prefill of up to a worker's
chunk as it replays them, and prefill in larger chunks.

Seeded random weights in the real shapes, made on the device: no file, no download. ``big``: for a GPU; else a
tiny model that only shows that all of it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ...engine.cache.kv_cache import KVCache, KVCacheLayout
from ...engine.model.config import ModelConfig, parse_config
from ...engine.model.decoder import DecoderModel
from ...engine.model.layers import LayerLoader, TensorSource
from ...engine.model.step_inputs import AttentionMetadata
from ...engine.step.batch import Batch
from ...engine.step.decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from ...engine.step.metadata import attention_metadata, metadata_arrays
from ...engine.step.prefill_graphs import PrefillGraphs
from ...kernels.cuda import CudaKernels
from ...kernels.gpu.attention_tiles import TileShape
from ...worker.settings import DEFAULT_BATCH_TOKENS
from .engine import make_batch
from .gpu_timing import Ceilings, Figure

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_600M = {
    **QWEN3_4B,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
}
TINY = {**QWEN3_600M, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "vocab_size": 60}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"Qwen3-0.6B": QWEN3_600M, "Llama-3.1-8B": LLAMA_8B, "Qwen3-4B": QWEN3_4B}
DECODES = tuple((batch, context) for context in (1024, 4096, 16384) for batch in (1, 8, 32, 64, 128, 256))
PREFILLS, CHUNK = (2048, 8192, 32768), 8192
BLOCK_SIZE = 64
GOAL_MODEL, GOAL_CONTEXT, PREFILL_GOAL = "Llama-3.1-8B", 1024, 0.7
CACHE_FRACTION = 0.85  # share of the memory beside the weights
REPEATS = 10


EXACT_SUFFIX = ", exact"


def engine_figures(name: str, exact: bool) -> Callable[[str, Ceilings, bool], Iterator[Figure]]:
    """The figures of one of ``MODELS``, or without a GPU of a tiny one."""

    def figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
        return model_figures(
            name if big else "tiny", MODELS[name] if big else TINY, device, ceilings, big, exact
        )

    return figures


def model_figures(
    name: str, shape: dict[str, Any], device: str, ceilings: Ceilings, big: bool, exact: bool
) -> Iterator[Figure]:
    started = time.perf_counter()
    graphs: tuple[int, Recorder] = (256, CudaRecorder()) if big else (2, run_again)
    max_len, chunk = (max(PREFILLS), DEFAULT_BATCH_TOKENS["cuda"]) if big else (64, 0)
    engine = BareEngine(shape, torch.device(device), exact, max_len, graphs, prefill_tokens=chunk)
    ready_us = (time.perf_counter() - started) * 1e6
    name += EXACT_SUFFIX if exact else ""
    rate = engine.weight_bytes / ready_us * 1e6
    yield Figure(f"{name}: weights made, graphs captured", ready_us, ready_us, rate, "B")
    decodes = ((8, 1024), (32, 4096)) if exact and big else DECODES if big else ((2, 20),)

    def decode_figures(wanted: Callable[[int], bool]) -> Iterator[Figure]:
        for batch, context in decodes:
            if wanted(context) and engine.fits(batch, context):
                yield from engine.decode(
                    name, batch, context, ceilings, walled=batch in (1, 2, 32) and context < 4096
                )

    yield from decode_figures(lambda context: context <= GOAL_CONTEXT)
    for tokens in PREFILLS if big else (20,):
        yield engine.prefill(name, tokens, ceilings)
    yield from decode_figures(lambda context: context > GOAL_CONTEXT)


class RandomTensors:
    """A checkpoint's tensors, drawn when they are asked for, of the size that keeps activations near 1."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._generator = device, torch.Generator(device)
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        self._shapes = expected

    def has(self, name: str) -> bool:
        return name in self._shapes

    def drop_pages(self) -> None:
        """They are memory of this process."""

    def stored(self, name: str) -> Tensor:
        return self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        self._generator.manual_seed(crc32(name.encode()))  # the same numbers whenever it is asked for
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.bfloat16, device=self._device)
        return drawn.mul_(shape[-1] ** -0.5)


class BareEngine:
    """A model, its cache and its decode graphs. ``shape``: the fields of config.json; ``num_tokens`` that the
    cache holds, 0 for what memory is left; without ``checkpoint`` the weights are random."""

    def __init__(
        self,
        shape: dict[str, Any],
        device: torch.device,
        exact: bool,
        max_len: int,
        graphs: tuple[int, Recorder],
        num_tokens: int = 0,
        checkpoint: TensorSource | None = None,
        dtype: torch.dtype = torch.bfloat16,
        prefill_tokens: int = 0,
    ) -> None:
        """``prefill_tokens``: of the largest step with a prompt that may have a graph."""
        self.config: ModelConfig = parse_config(
            {"rms_norm_eps": 1e-5, "max_position_embeddings": max_len, **shape}, {}
        )
        self._device = device
        gpu = device.type == "cuda"
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if gpu else 1
        kernels = CudaKernels(num_sms, exact, prefill_shape=None if gpu else TileShape(16, 32, 4, 3))
        layout = KVCacheLayout.of(self.config, BLOCK_SIZE, dtype)
        with torch.inference_mode():
            self._model = DecoderModel(
                self.config, LayerLoader(checkpoint or RandomTensors(device), kernels, dtype, device), max_len
            )
            num_blocks = -(-num_tokens // BLOCK_SIZE) or (
                int(torch.cuda.mem_get_info(device)[0] * CACHE_FRACTION) // layout.block_bytes if gpu else 16
            )
            self._cache = KVCache(layout, num_blocks, device)
            self._cache.pool.normal_()
            vocab_size, max_blocks = self.config.vocab_size, -(-max_len // BLOCK_SIZE) + 1
            self._graphs = DecodeGraphs(
                self._decode, vocab_size, graphs[0], max_blocks, BLOCK_SIZE, device, graphs[1]
            )
            self._prefill_graphs: PrefillGraphs | None = None
            if most := prefill_tokens:
                pool = self._cache.pool
                self._prefill_graphs = PrefillGraphs(
                    self._model, pool, vocab_size, most, max_blocks, graphs[1]
                )

    @property
    def num_layer_weights(self) -> int:
        c = self.config
        return (
            c.num_layers
            * c.hidden_size
            * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size)
        )

    @property
    def weight_bytes(self) -> int:
        """What a step reads."""
        return 2 * (self.num_layer_weights + self.config.vocab_size * self.config.hidden_size)

    def fits(self, batch: int, context: int) -> bool:
        return batch * -(-context // BLOCK_SIZE) <= self._cache.num_blocks

    def decode(
        self, name: str, batch: int, context: int, ceilings: Ceilings, walled: bool
    ) -> Iterator[Figure]:
        """A step's time on the device; and, where ``walled``, with its inputs built and its tokens brought
        back, step after step."""
        step = self._batch(batch, context - 1, 1)
        us = device_us(lambda: self.decode_logits(step), REPEATS)
        num_bytes = self.weight_bytes + batch * context * self._cache.layout.block_bytes / BLOCK_SIZE
        floor = max(num_bytes / ceilings.copy, batch * self.weight_bytes / ceilings.flops) * 1e6
        what = f"{name}: decode step, batch {batch}, context {context}"
        goal = decode_goal(batch) if name == GOAL_MODEL and context == GOAL_CONTEXT else None
        yield Figure(what, us, floor, num_bytes / us * 1e6, "B", goal)
        if walled:
            wall = self._wall_us(batch, context)
            yield Figure(
                f"{what}: of the whole step, the device's part", wall, us, num_bytes / wall * 1e6, "B"
            )

    def prefill(self, name: str, tokens: int, ceilings: Ceilings) -> Figure:
        """Chunks back to back, logits of the last token; by a graph where a worker has one."""
        chunks = [self._batch(1, start, min(CHUNK, tokens - start)) for start in range(0, tokens, CHUNK)]

        def run() -> None:
            for batch in chunks:
                if self._replayed(batch) is None:
                    self.step_logits(batch)

        us = device_us(run, 2)
        c = self.config
        attention = 2 * c.num_layers * c.num_heads * c.head_dim * tokens**2  # two products over half a square
        flops = 2 * tokens * self.num_layer_weights + attention
        goal = PREFILL_GOAL if name == GOAL_MODEL else None
        floor = flops / ceilings.flops * 1e6
        return Figure(f"{name}: prefill, {tokens} tokens", us, floor, flops / us * 1e6, "FLOP", goal)

    @property
    def pool(self) -> Tensor:
        return self._cache.pool

    def step_logits(self, batch: Batch) -> Tensor:
        """float32 [num_seqs, vocab_size] of each sequence's last token; not by a graph."""
        with torch.inference_mode():
            arrays = metadata_arrays(batch)
            sent = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
            metadata = attention_metadata(batch, sent)
            last = torch.from_numpy(batch.query_start_loc[1:] - 1).to(self._device, torch.int64)
            ids = torch.from_numpy(batch.token_ids).to(self._device)
            return self._model.logits(self._model.forward(ids, metadata, self._cache.pool, last))

    def _replayed(self, batch: Batch) -> Tensor | None:
        if self._prefill_graphs is None:
            return None
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        with torch.inference_mode():
            found = self._prefill_graphs.logits(batch, range(batch.num_seqs), nothing, None)
        return None if found is None else found.logits

    def decode_logits(self, batch: Batch) -> Tensor:
        """The same of a decode step, by a graph; valid until the next one."""
        with torch.inference_mode():
            return self._graphs.logits(batch)[0]

    def _batch(self, num_seqs: int, start: int, count: int) -> Batch:
        batch = make_batch(num_seqs, start, count, BLOCK_SIZE)
        batch.token_ids[:] %= self.config.vocab_size
        return batch

    def _decode(self, token_ids: Tensor, metadata: AttentionMetadata, logits: Tensor) -> None:
        self._model.logits(self._model.forward(token_ids, metadata, self._cache.pool, None), logits)

    def _wall_us(self, batch: int, context: int) -> float:
        def step() -> None:
            self.decode_logits(self._batch(batch, context - 1, 1)).argmax(dim=-1).cpu()

        step()
        started = time.perf_counter()
        for _ in range(REPEATS):
            step()
        return (time.perf_counter() - started) * 1e6 / REPEATS


def decode_goal(batch: int) -> float:
    """Least share of the floor."""
    return 0.8 if batch <= 64 else 0.7


def device_us(run: Callable[[], object], repeats: int) -> float:
    """Mean microseconds of a run, of several in a row after one warm-up."""
    run()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6
    cuda: Any = torch.cuda
    start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3 / repeats


def run_again(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """In place of a graph where there is no GPU."""
    return compute
