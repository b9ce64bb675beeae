"""A model in memory: weights, kernels and a KV cache, by the settings and the memory that is free."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..kernels.interface import AttentionShape, Kernels
from ..kernels.packed_weights import PackedWeights, kept_files
from ..kernels.select import UnsuitableKernelsError, numerics, select_kernels
from .cache.kv_cache import KVCache, KVCacheLayout
from .cache.kv_cache_size import KVCacheSize, host_room, kv_cache_size, shrunk
from .cache.memory_claims import MemoryClaims
from .cpu_threads import AUTO, CpuThreads, choose_threads, cpu_quota, new_threads_bound, usable_cores
from .device import available_bytes, free_host_bytes, loaded_on, select_device, select_dtype
from .engine_config import (
    DEFAULT_BLOCK_SIZE,
    EngineConfig,
    check_formats,
    gpu_room_of,
    max_model_len,
    model_config,
    wish_of,
)
from .errors import ModelConfigError, OutOfMemoryError
from .model.adapters import RankAdapters
from .model.block_spread import BlockSpread, step_bytes
from .model.config import ModelConfig
from .model.decoder import DecoderModel
from .model.expert_split import log_split, split_experts
from .model.layers import LayerLoader
from .model.model_folder import content_names
from .model.ranks import ALONE, Rank, check_split, of_rank, spreads_blocks
from .model.weight_sizes import weight_bytes
from .model.weights import Checkpoint
from .settings import WorkerSettings
from .vision.config import VisionConfig, tower_of
from .vision.tower import VisionTower
from .worker_readings import StartPhases

logger = logging.getLogger(__name__)

CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LOADING_THREADS = {"cpu": 1, "cuda": 8}
PACKING_THREADS = 16  # and no more: memory is the limit
TORCH_SPLITS = 1 << 20  # elements that torch sums on several threads


class LoadedModel:
    """``max_model_len``: what the KV cache holds at most; ``kv_name``, ``revision``, ``numerics``: see
    ``ModelIdentity``; ``phases``: how long each part of the start took; ``takes_images``: prompts may have
    some, which another worker may have computed.

    ``layout``: of a whole block. On a CPU all ranks write to the one pool of such blocks; on GPUs each has a
    pool of its own heads, or of its own blocks (``spread``). ``pool``: what this rank computes with."""

    adapters: RankAdapters | None = None
    vision: VisionTower | None = None  # None: no images are computed here
    spread: BlockSpread | None = None  # None: each rank has a part of every block

    def __init__(self, engine: EngineConfig, rank: Rank = ALONE, first: LoadedModel | None = None) -> None:
        """``first``: of rank 0, for the others. Raises EngineError with what to do."""
        self.phases, settings = StartPhases(), engine.settings
        self.rank, self._engine = rank, engine
        config = model_config(settings)
        self.device = select_device(settings.device, rank.number, rank.size)
        check_formats(settings, config, self.device)
        check_split(config, rank.size, settings.exact, settings.expert_parallel)
        config = split_experts(config, rank.size, settings.expert_parallel)
        if config.mixture is not None and first is None:
            log_split(config.mixture, rank.size, settings.expert_parallel)
        self._tower: VisionConfig | None = tower_of(settings.model) if first is None else first._tower
        self.takes_images = self._tower is not None
        self._model_len = max_model_len(settings.max_model_len, config)
        self.config = config.for_length(self._model_len)
        self.own_heads = rank.kv_heads(config.num_kv_heads)
        self._claims: MemoryClaims = MemoryClaims(settings.coordinator) if first is None else first._claims
        self._threads: CpuThreads = self._claim_threads(settings) if first is None else first._threads
        threads = self._threads.of_rank(rank.number)
        self._num_torch_threads = 1 if settings.exact else threads.count  # torch's own sums change with it
        self._bound_cores, self._bound = threads.bound, threading.local()
        self._use_torch()
        self._names: tuple[str, str] = _names(settings, self.config) if first is None else first._names
        weights_name, self.revision = self._names
        self.phases.done("fingerprint")
        kept: Sequence[Path] = ()
        if self.device.type == "cpu":
            part = f"{rank.number}-of-{rank.size}" if rank.size > 1 else ""
            part += "-whole-experts" * bool(part and config.mixture and config.mixture.whole_experts)
            kept = kept_files(settings.model, weights_name, settings.dtype, settings.exact, part=part)
        packed = PackedWeights(kept, min(threads.loading, PACKING_THREADS))
        block_size = settings.block_size or DEFAULT_BLOCK_SIZE[self.device.type]
        if spreads_blocks(config, rank.size, settings.exact):
            self.spread = BlockSpread(rank, block_size)
        self.kernels = self._select_kernels(settings, threads, block_size, packed)
        mixture = config.mixture if config.mixture is not None and any(config.mixture.layers) else None
        sums, whole = mixture is not None, mixture is not None and mixture.whole_experts
        self.numerics = numerics(self.device, settings.exact, rank.size if sums else 1, whole)
        self.layout, self._weight_bytes = self._load(settings, weights_name, self._model_len, block_size)
        packed.finish()
        self.phases.done("weights")

    def use_this_thread(self) -> None:
        """The number of threads and the device are settings of the calling thread."""
        self.kernels.use_this_thread()
        self._use_torch()

    def _use_torch(self) -> None:
        torch.set_num_threads(self._num_torch_threads)
        if self._bound_cores and threading.current_thread() is not threading.main_thread():
            self._bind_this_thread()
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    def _bind_this_thread(self) -> None:
        """Once, after the threads of torch that it brings along: they would inherit its one core."""
        if not getattr(self._bound, "done", False):
            with new_threads_bound(self._bound_cores[1:]):
                torch.ones(TORCH_SPLITS).sum()
            os.sched_setaffinity(0, self._bound_cores[:1])
            self._bound.done = True

    def _claim_threads(self, settings: WorkerSettings) -> CpuThreads:
        """Those of this worker, by the cores that others have claimed."""
        if self.device.type != "cpu":
            return CpuThreads(1 if settings.threads == AUTO else settings.threads, (), False, "")
        with self._claims.turn() as others:
            absent = max(0, settings.memory_shared_by - 1 - len(others.siblings))
            place = usable_cores(), cpu_quota(), others.cores
            threads = choose_threads(settings.threads, *place, absent, self.rank.size)
            self._claims.claim_cores(threads.cores)
        logger.info("%s", threads)
        return threads

    def _select_kernels(
        self, settings: WorkerSettings, threads: CpuThreads, block_size: int, packed: PackedWeights
    ) -> Kernels:
        """Raises ModelConfigError."""
        c = of_rank(self.config, self.rank)
        shape = AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, block_size, c.sliding_windows)
        try:
            with new_threads_bound(threads.bound[1:]):
                return select_kernels(
                    self.device,
                    threads.count,
                    settings.exact,
                    settings.quantization,
                    kv_dtype=settings.kv_dtype,
                    fp8_weights=c.quantisation is not None and c.quantisation.float8,
                    packed=packed,
                    shape=shape if c.latent is None and c.full_heads is None else None,
                    rank=self.rank.number,
                )
        except UnsuitableKernelsError as error:
            raise ModelConfigError(str(error)) from error

    def _load(
        self, settings: WorkerSettings, weights_name: str, model_len: int, block_size: int
    ) -> tuple[KVCacheLayout, int]:
        """Load the weights. Return the KV cache's layout, and the bytes of host memory that they take."""
        on_cpu = self.device.type == "cpu"
        with Checkpoint(settings.model) as checkpoint, torch.inference_mode():
            self.dtype = select_dtype(settings.dtype, self.device, checkpoint.dtype)
            cache_dtype = CACHE_DTYPES.get(settings.kv_dtype, self.dtype)
            dtypes = f"{self.dtype} {cache_dtype}".replace("torch.", "")
            self.kv_name = f"{weights_name} {dtypes} {self.numerics}"
            layout, group = KVCacheLayout.of(self.config, block_size, cache_dtype), self.kernels.key_group
            if group > 1 and (layout.planes, block_size % group) == (2, 0):
                self.kv_name += f", keys by {group}"
            self.kv_name += " mtp" * settings.mtp + ", spread states" * self.config.spreads_states
            # no table of angles for more
            longest = available_bytes(self.device) * self._num_shares // layout.block_bytes * block_size
            weights = weight_bytes(self.config, self.dtype.itemsize, settings.quantization) if on_cpu else 0
            tower = self._tower if self._engine.computes_images else None
            weights += tower.num_bytes(self.dtype.itemsize) if on_cpu and tower is not None else 0
            if self.rank.number == 0:
                with self._claims.turn():
                    self._claims.claim(weights)
            if settings.lora_folder is not None:
                slots = settings.max_loras, settings.max_lora_rank
                self.adapters = RankAdapters(self.kernels, self.dtype, self.device, *slots)
            load = LayerLoader(
                checkpoint,
                self.kernels,
                self.dtype,
                self.device,
                LOADING_THREADS[self.device.type],
                self.config.quantisation,
                settings.exact,
                self.rank,
                self.adapters,
                self.spread,
            )
            most, fp8_cache = min(model_len, max(longest, 1)), settings.kv_dtype == "fp8"
            self.decoder = loaded_on(self.device, lambda: DecoderModel(self.config, load, most, fp8_cache))
            if tower is not None:
                self.vision = loaded_on(self.device, lambda: VisionTower(tower, load))
        return layout, weights

    def make_cache(self, num_blocks: int, max_model_len: int, first: LoadedModel | None = None) -> None:
        """Raises OutOfMemoryError."""
        self.max_model_len, layout, heads = max_model_len, self.layout, self.own_heads
        if max_model_len < self._model_len and first is None:
            logger.warning(
                "max_model_len is %d, not the model's %d: the KV cache of %.2f GiB holds no longer sequence; "
                "with more memory, or a larger --kv-cache-gib, it could",
                max_model_len, self._model_len, num_blocks * layout.block_bytes / 2**30
            )  # fmt: skip
        if self.device.type != "cpu":
            self.kv_cache = KVCache(self.own_layout, -(-num_blocks // self._num_shares), self.device)
            self.pool = self.kv_cache.pool
        else:
            allocate = self._engine.pool_allocator
            self.kv_cache = (
                KVCache(layout, num_blocks, self.device, allocate) if first is None else first.kv_cache
            )
            if allocate is not None and first is None:
                self._claims.committed(self.kv_cache.num_bytes)
            blocks = slice(None) if self.spread is None else slice(self.rank.number, None, self.rank.size)
            self.pool = self.kv_cache.pool[blocks, :, :, heads]
        self.phases.done("KV cache")

    @property
    def _num_shares(self) -> int:
        """How many GPUs share out the blocks, each in a pool of its own."""
        return 1 if self.spread is None or self.device.type == "cpu" else self.rank.size

    @property
    def num_blocks(self) -> int:
        """The number of blocks that all ranks hold together."""
        return self.kv_cache.num_blocks * self._num_shares

    @property
    def own_layout(self) -> KVCacheLayout:
        """That of a block of this rank's heads."""
        return replace(self.layout, num_kv_heads=self.own_heads.stop - self.own_heads.start)

    def cache_size(self) -> KVCacheSize:
        """Size the KV cache by the memory that is free now, and claim it where that is the host's. Raises
        OutOfMemoryError."""
        engine, weights = self._engine, self._weight_bytes
        wish = wish_of(engine, self.layout, self.config.max_model_len, self.device)
        shares = self._num_shares
        if self.device.type != "cpu" and shares == 1:
            part = None if wish.num_bytes is None else wish.num_bytes // self.rank.size
            wish = replace(wish, block_bytes=self.own_layout.block_bytes, num_bytes=part)
        with self._claims.turn() as others:
            pending = others.pending
            if self.device.type == "cuda":
                pending = 0
                torch.cuda.empty_cache()  # what loading has left over
                used = torch.cuda.memory_reserved(self.device)
                config = of_rank(self.config, self.rank)
                tower = None if self.vision is None else self._tower
                more = step_bytes(self.config, self.dtype.itemsize) if self.spread else 0
                room = gpu_room_of(engine, config, self.device, self.dtype, used, tower, more_step=more)
            else:
                room = host_room(
                    free=free_host_bytes(),
                    pending=pending,
                    siblings=others.siblings,
                    weights=weights,
                    utilization=engine.settings.cpu_memory_utilization,
                    sharers=engine.settings.memory_shared_by,
                )
            if engine.settings.kv_cache_shrink:
                cut = shrunk(wish, max(0, available_bytes(self.device) - pending) * shares)
                if cut is not wish:
                    gib = (cut.num_blocks or 0) * cut.block_bytes / 2**30
                    logger.warning(
                        "the KV cache that was asked for does not fit any more: it starts with %.2f GiB", gib
                    )
                wish = cut
            size = kv_cache_size(wish, room * shares)
            if self.device.type == "cpu":
                num_bytes = size.num_blocks * wish.block_bytes
                if pending and num_bytes > (left := max(0, available_bytes(self.device) - pending)):
                    raise OutOfMemoryError(
                        f"a KV cache of {num_bytes / 2**30:.2f} GiB does not fit: of the free memory, "
                        f"other workers of this host have claimed all but {left / 2**30:.2f} GiB; lower "
                        "--kv-cache-gib or --num-blocks, or start fewer workers here"
                    )
                self._claims.claim(weights, num_bytes)
        return size


def _names(settings: WorkerSettings, config: ModelConfig) -> tuple[str, str]:
    """Return the names of the weights and of the revision: workers of other weights share no KV cache."""
    weights_name, revision = content_names(settings.model)
    if any(rope.short_factors and rope.long_factors != rope.short_factors for rope in config.ropes):
        weights_name += "-long"  # other keys than with --max-model-len up to the original length
    if settings.quantization != "none":
        weights_name += f"-{settings.quantization}"
    return weights_name, revision
