"""Whatever memory a recorded graph reads or writes stays its own: a graph knows addresses alone. Memory
without a reference goes to other tensors, or back to the device, and replays still write there.

The kernels are the GPU's, in Triton's interpreter. A recording notes the memory that its computation uses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from support.engines import engine_config
from support.models import make_checkpoint
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.step import decode_graphs, prefill_graphs
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape

triton_interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


class Recording(TorchDispatchMode):
    """What a computation uses of the memory that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, StorageWeakRef] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.use((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._made |= {at for at, _ in _storages(result)} - self.used.keys()
        return result

    def use(self, values: Any) -> None:
        """Take note of an operation's or a kernel's arguments."""
        self.used |= {
            at: StorageWeakRef(storage) for at, storage in _storages(values) if at not in self._made
        }


def _storages(values: Any) -> Iterable[tuple[int, torch.UntypedStorage]]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            yield storage._cdata, storage


def test_all_memory_that_graphs_use_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings: list[Recording] = []
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        if recordings:
            recordings[-1].use((args, kwargs))
        launch(self, *args, **kwargs)

    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recordings.append(Recording())
        with recordings[-1]:
            result = compute()
        return lambda: result

    kernels = CudaKernels(num_sms=1, prefill_shape=TileShape(16, 32, 4, 3))
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(decode_graphs, "BUCKETS", (1, 2))
    monkeypatch.setattr(prefill_graphs, "TOKEN_BUCKETS", (4, 8))
    monkeypatch.setattr(prefill_graphs, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(prefill_graphs, "FASTER", 2)
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    runner = ModelRunner(
        engine_config(
            tmp_path, "cpu", "float32", 8, 8, max_model_len=40, max_decode_seqs=2, max_prefill_tokens=8
        )
    )
    runner.capture(record)
    gc.collect()
    assert len(recordings) == 2 + 2 * 3
    for recording in recordings:
        assert len(recording.used) > 5, "weights, inputs, angles, the cache, ..."
        assert not [storage for storage in recording.used.values() if storage.expired()]
