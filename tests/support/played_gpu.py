"""A GPU played on the CPU: its tensors lie in host memory, but report ``cuda:0``, and refuse the same as
those of a GPU.

An operation on tensors of both sides is an error, as is a look into a GPU's tensor as a numpy array. What
would make the host wait for the device is noted in ``waits``: values read, copies from or to memory that is
not page-locked, lists and host tensors as indices. While a graph is captured any of these is an error.
Page-locked memory may not be written before the host has waited for the step that copies from it. Triton's
kernels run in its interpreter, on the GPU's tensors only; ``variants`` are those a GPU would have compiled
for that, and ``ready`` forbids further ones.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from torch.overrides import TorchFunctionMode

from .gpu_tensors import GPU, OnGpu, compiled_for, kind_of, on_host_memory, tensors_in, wrapped

READS = {"item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"}
COPIES = {"to", "copy_", "cpu", "index_select", "index_copy_"}
TELLS = {
    "data_ptr", "untyped_storage", "size", "stride", "numel", "dim", "element_size", "as_subclass", "__len__",
    "is_contiguous",
}  # fmt: skip


class PlayedGpu(TorchFunctionMode):
    """``waits``: the operations that a host would have waited in. ``variants``: the compiled kernels, by the
    name and what Triton compiles each for. ``ready``: the worker serves, and compiles nothing any more."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.sent, self._captures = 0, threading.local()  # copies to the GPU; whether this thread captures
        self.total_bytes = self.free_bytes = self.reserved_bytes = 0  # the last: of this process, in use
        self.cached_bytes = 0  # of this process, kept by torch and not in use
        self.step, self.launching, self.ready = 0, False, False
        self.variants: set[str] = set()
        self._pinned: dict[int, torch.Tensor] = {}  # page-locked memory, kept for good: addresses name it
        self._under_way: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # copies: step, source, content
        self.streams = threading.local()  # ``entered``: the GPUs of a thread's streams; ``gpu``: its own
        self.beside_steps = False  # no copy and no memory for one on a GPU's default stream: steps run there
        self._answers: dict[Any, object] = {
            torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        on_gpu = [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, OnGpu)]
        on_host = [x for x in tensors_in((*args, *kwargs.values())) if not isinstance(x, OnGpu)]
        if on_gpu and func in self._answers:
            return self._answers[func]
        if on_gpu and func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", on_gpu[0].index)
        if self.beside_steps and name in COPIES:
            assert {x.index for x in on_gpu} <= set(self.streams.entered), f"{name} waits for steps"
        if name in ("to", "copy_", "pin_memory", "cpu"):
            return self._moved(name, func, args, kwargs)
        if name in ("numpy", "__array__") and on_gpu:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name in READS and on_gpu:
            self._wait(name)
        elif name in ("__getitem__", "__setitem__") and isinstance(args[0], OnGpu):
            self._index(name, args[1])
        elif on_gpu and name not in TELLS and any(x.dim() > 0 for x in on_host):
            raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
        if len({x.index for x in on_gpu}) > 1 and name not in TELLS:
            raise RuntimeError(f"Expected all tensors to be on the same GPU: {name}")
        place = kwargs.pop("device", None)
        placed = on_gpu if place is None else torch.device(place).type == "cuda"
        if place is not None and not placed:
            kwargs["device"] = place
        if placed and place is not None and name in ("tensor", "as_tensor"):
            self._wait(name)
        if self.beside_steps and name == "empty" and placed:
            assert kind_of(place).index in self.streams.entered, "a step under way may use this memory"
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            self._lock(result)
        kind = kind_of(place) if place is not None or not on_gpu else type(on_gpu[0])
        return wrapped(result, kind) if placed and name not in READS else result

    def _moved(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, rest = args[0], list(args[1:])
        if name == "pin_memory":
            assert not isinstance(x, OnGpu), "cannot pin a GPU's tensor"
            return self._lock(x.clone())
        if name == "copy_":
            self._cross(rest[0], isinstance(x, OnGpu), kwargs.get("non_blocking", False), x)
            torch.Tensor.copy_(x, rest[0])
            return x
        place = kwargs.pop("device", None)
        for option in rest:
            named = option.device if isinstance(option, torch.Tensor) else option
            place = named if isinstance(named, (str, torch.device)) else place
        rest = [option for option in rest if not isinstance(option, (str, torch.device))]
        place = torch.device("cuda", x.index) if place is None and isinstance(x, OnGpu) else place
        to_gpu = name != "cpu" and place is not None and torch.device(place).type == "cuda"
        kind = kind_of(place)
        self._cross(x, to_gpu, kwargs.pop("non_blocking", False), None)
        result = torch.Tensor.to(x, *rest, **kwargs) if rest or kwargs else x.as_subclass(torch.Tensor)
        if kind is type(x) if to_gpu else not isinstance(x, OnGpu):
            return wrapped(result, kind) if to_gpu else result
        result = result.clone() if result.data_ptr() == x.data_ptr() else result
        return wrapped(result, kind) if to_gpu else result.as_subclass(torch.Tensor)

    def _cross(
        self, source: torch.Tensor, to_gpu: bool, non_blocking: bool, target: torch.Tensor | None
    ) -> None:
        if isinstance(source, OnGpu) == to_gpu:
            return
        host = source if to_gpu else target
        self.sent += to_gpu
        if not (non_blocking and host is not None and host.untyped_storage().data_ptr() in self._pinned):
            self._wait("a copy to the GPU" if to_gpu else "a copy from the GPU")
        elif to_gpu:
            self._under_way.append((self.step, source, source.clone()))
        assert not self.capturing, "a graph would copy from this host memory for ever"

    def _index(self, name: str, index: Any) -> None:
        for part in index if isinstance(index, tuple) else (index,):
            on_host = isinstance(part, torch.Tensor) and (
                not isinstance(part, OnGpu) or part.dtype == torch.bool
            )
            if on_host or isinstance(part, list):
                self._wait(f"{name} by {type(part).__name__}")

    def _wait(self, name: str) -> None:
        assert not self.capturing, f"{name}: not permitted when a stream is capturing"
        self.waits.append(name)

    def _lock(self, host: torch.Tensor) -> torch.Tensor:
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    @property
    def capturing(self) -> bool:
        return getattr(self._captures, "now", False)

    def passed(self, step: int) -> None:
        """The host has waited for this step, and may write to its copies' sources again."""
        while self._under_way and self._under_way[0][0] <= step:
            _, source, held = self._under_way.pop(0)
            assert torch.equal(source, held), "page-locked memory was written while it was copied to the GPU"

    def launched(self, kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        """Note which variant of the kernel this launch takes. Triton compiles one for each constexpr, type,
        option, alignment of a pointer to 16 bytes, and integer that is 1 or a multiple of 16."""
        signature = inspect.signature(kernel.fn)
        given = signature.bind(*args, **{k: v for k, v in options.items() if k in signature.parameters})
        plain = kernel.kwargs.get("do_not_specialize") or ()
        values = [
            repr(value)
            if "constexpr" in str(signature.parameters[name].annotation)
            else compiled_for(value, name in plain)
            for name, value in given.arguments.items()
        ]
        others = sorted((k, v) for k, v in options.items() if k not in signature.parameters)
        variant = f"{kernel.fn.__name__}({', '.join(values)}; {others})"
        assert not self.ready or variant in self.variants, f"compiled after the worker was ready: {variant}"
        self.variants.add(variant)

    @contextmanager
    def launch(self) -> Iterator[None]:
        """A step is launched within, and the host waits for nothing but the steps before it."""
        self.step += 1
        before, self.launching = len(self.waits), True
        yield
        self.launching = False
        assert len(self.waits) == before, f"the host waits for the device in a launch: {self.waits[before:]}"

    def empty_cache(self) -> None:
        self.cached_bytes = 0

    @property
    def num_page_locked_bytes(self) -> int:
        """Bytes of host memory that were ever page-locked."""
        return sum(host.untyped_storage().nbytes() for host in self._pinned.values())

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """In place of ``CudaRecorder``: a replay computes the same again on the same memory."""
        compute()
        self.passed(self.step)  # to begin a capture is to wait for the device
        result = self._captured(compute)

        def replay() -> torch.Tensor:
            again = self._captured(compute)
            with torch._C.DisableTorchFunction():
                result.as_subclass(torch.Tensor).copy_(again)
            return result

        return replay

    def _captured(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._captures.now = True
        try:
            return compute()
        finally:
            self._captures.now = False


class Event:
    """``gpu.step`` counts the steps that were launched: to wait for an event of the one that is being
    launched is a wait for the device, one for an event of an earlier step is not; nor is one in a thread of
    its own (``blocking``)."""

    def __init__(self, gpu: PlayedGpu, blocking: bool = False) -> None:
        self._gpu, self._step, self._beside = gpu, -1, blocking

    def record(self, stream: object = None) -> None:
        self._step = self._gpu.step

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._gpu.launching and self._step == self._gpu.step and not self._beside:
            self._gpu.waits.append("an event of the step that is being launched")
        if not self._beside:
            self._gpu.passed(self._step)


class Stream:
    def __init__(self, device: object = None) -> None:
        self.gpu = torch.device(GPU if device is None else device).index or 0  # type: ignore[call-overload]

    def synchronize(self) -> None: ...


@contextmanager
def played_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int = 1 << 30) -> Iterator[PlayedGpu]:
    """torch finds a GPU, in this thread and in those that are started within."""
    gpu = PlayedGpu()
    gpu.free_bytes = gpu.total_bytes = free_bytes
    gpu.streams.entered = []
    interpreting = threading.Lock()  # its grid is a global, and it parses its functions

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        before = getattr(gpu.streams, "entered", [])
        gpu.streams.entered = before if stream is None else [*before, stream.gpu]
        yield
        gpu.streams.entered = before

    properties = SimpleNamespace(name="a played GPU", multi_processor_count=1, uuid="0")
    for name, value in {
        "is_available": lambda: True, "Stream": Stream, "Event": partial(Event, gpu),
        "stream": on, "current_stream": Stream,
        "mem_get_info": lambda _=None: (gpu.free_bytes - gpu.cached_bytes, gpu.total_bytes),
        "memory_reserved": lambda _=None: gpu.reserved_bytes + gpu.cached_bytes,
        "get_device_properties": lambda _: properties,
        "get_device_capability": lambda _=None: (9, 0), "get_device_name": lambda _: properties.name,
        "set_device": lambda device: setattr(gpu.streams, "gpu", device.index or 0),
        "device": lambda _: nullcontext(), "empty_cache": gpu.empty_cache,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    bootstrap: Callable[[threading.Thread], None] = vars(threading.Thread)["_bootstrap_inner"]
    launch = interpreter.GridExecutor.__call__
    interpret = interpreter.InterpretedFunction.run

    def run_with_gpu(thread: threading.Thread) -> None:
        with gpu:
            bootstrap(thread)

    def launch_on_gpu(executor: Any, *args: Any, **kwargs: Any) -> None:
        given = list(tensors_in((*args, *kwargs.values())))
        with torch._C.DisableTorchFunction():
            assert all(isinstance(x, OnGpu) for x in given), (
                "Pointer argument cannot be accessed from Triton (cpu tensor?)"
            )
            current = [getattr(gpu.streams, "gpu", 0), *getattr(gpu.streams, "entered", [])][-1]
            assert {x.index for x in given} == {current}, "a kernel is launched on another GPU"
            on_host = {name: on_host_memory(value) for name, value in kwargs.items()}
            launch(executor, *(on_host_memory(x) for x in args), **on_host)

    def note_and_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            gpu.launched(kernel, args, options)
        with interpreting:
            interpret(kernel, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", run_with_gpu)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", note_and_launch)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_on_gpu)
    with gpu:
        yield gpu
