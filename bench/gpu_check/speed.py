"""Figures of kernels and of whole models, each as a share of the measured ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch

from ...kernels.cuda import CudaKernels
from ...kernels.gpu.provided_attention import FLASH_ATTENTION_3, usable
from ...kernels.interface import AttentionShape
from ..kernels import gate_up as candidate
from ..kernels import kernel_figures
from ..kernels.engine_figures import EXACT_SUFFIX, engine_figures
from ..kernels.gpu_timing import Ceilings, Figure
from ..kernels.state_checks import state_figures
from ..kernels.transformers_peer import PeerFailed
from .correctness import interpret, results
from .line import Line, Place, figure_line, left_out

Figures = Callable[[str, Ceilings, bool], Iterator[Figure]]
EXACT_MODEL = "Qwen3-4B"
MOST_FP8_SLOPE = 0.6  # of bfloat16's
MOST_FILTER_US = 150.0


def lines_of(place: Place, *figures: Figures) -> Iterator[Line]:
    interpret(place)
    ceilings = place.ceilings()
    for each in figures:
        for figure in each(place.device, ceilings, place.big):
            yield figure_line(figure)


def engine(place: Place, name: str) -> Iterator[Line]:
    yield from lines_of(place, engine_figures(name, exact=False))


def attention(place: Place) -> Iterator[Line]:
    yield fp8_slope(place)
    yield from lines_of(place, kernel_figures.decode_figures, kernel_figures.prefill_figures)


def fp8_slope(place: Place) -> Line:
    """Decode attention's time for each more token of context, in float8 beside bfloat16."""
    interpret(place)
    batch, contexts, heads = (
        (32, (1024, 8192), kernel_figures.LLAMA_8B) if place.big else (2, (70, 200), kernel_figures.TINY)
    )
    slopes = []
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        short, long = (
            kernel_figures.decode_figure(
                place.device, place.ceilings(), batch, context, heads, place.big, dtype=dtype
            ).us
            for context in contexts
        )
        slopes.append((long - short) / (contexts[1] - contexts[0]))
    return Line(
        f"decode attention, batch {batch}: float8 KV slope beside bfloat16's",
        value=slopes[0] / slopes[1],
        unit="share",
        at_most=MOST_FP8_SLOPE,
        note=f"{slopes[0] * 1e3:.2f} of {slopes[1] * 1e3:.2f} ns a token of context",
    )


def small_kernels(place: Place) -> Iterator[Line]:
    interpret(place)
    plain: dict[str, float] = {}  # microseconds by size
    for figure in kernel_figures.sampling_figures(place.device, place.ceilings(), place.big):
        _, name, size = figure.what.split(", ")
        yield figure_line(figure)
        if name == "plain":
            plain[size] = figure.us
        else:
            what, more = f"sampling {size}: {name} costs", figure.us - plain[size]
            yield Line(what, value=more, unit="us", at_most=MOST_FILTER_US)
    yield from lines_of(place, kernel_figures.small_figures, kernel_figures.block_figures)


def linears(place: Place) -> Iterator[Line]:
    yield from lines_of(place, kernel_figures.linear_figures, kernel_figures.low_rank_figures)


def recurrent(place: Place) -> Iterator[Line]:
    yield from lines_of(place, state_figures)


def gate_up(place: Place) -> Iterator[Line]:
    """The MLP's first half by one kernel: its values, and its times beside those of two."""
    interpret(place)
    yield from results(candidate.checks(place.big), place.device)
    figures = candidate.gate_up_figures(place.device, place.ceilings(), place.big)
    for size, ways in groupby(figures, lambda figure: figure.what.partition(" rows, ")[0]):
        us: dict[str, float] = {}
        for figure in ways:
            yield figure_line(figure)
            us[figure.what.removeprefix(f"{size} rows, ")] = figure.us
        two = us.pop(candidate.TWO_KERNELS)
        best = min(us, key=us.__getitem__)
        what, note = f"{size} rows: one kernel's time beside two's", f"{us[best]:.1f} of {two:.1f} us, {best}"
        yield Line(what, value=us[best] / two, unit="share", headline=True, note=note)


def other_tiles(place: Place) -> Iterator[Line]:
    yield from lines_of(place, kernel_figures.decode_tile_figures)


def worker(place: Place) -> Iterator[Line]:
    from ..kernels.gpu_worker import worker_figures

    try:
        yield from lines_of(place, worker_figures)
    except PeerFailed as problem:  # no fault of ours, and the last figure
        yield left_out("beside transformers", str(problem))


def exact_costs(place: Place) -> Iterator[Line]:
    """An engine with and without exact mode, and how much longer it takes with."""
    interpret(place)
    times: dict[str, float] = {}
    for exact in (False, True):
        for figure in engine_figures(EXACT_MODEL, exact)(place.device, place.ceilings(), place.big):
            times[figure.what] = figure.us
            yield figure_line(figure)
    for what, us in times.items():
        plain = times.get(what.replace(EXACT_SUFFIX, "", 1))
        if EXACT_SUFFIX in what and plain and "graphs captured" not in what:
            yield Line(f"exact costs more: {what}", value=us / plain - 1, unit="share", headline=True)


def flash_attention_3(place: Place) -> Iterator[Line]:
    """FlashAttention-3's causal prefill beside ours, of the same run and over the same cache, where the
    product would use it."""
    interpret(place)
    sizes, heads = (
        ((2048, 8192, 32768), kernel_figures.LLAMA_8B) if place.big else ((20,), kernel_figures.TINY)
    )
    num_kv_heads, group, head_dim = heads
    shape = AttentionShape(num_kv_heads * group, num_kv_heads, head_dim, kernel_figures.BLOCK_SIZE)
    ours = CudaKernels(1, prefill_shape=None if place.big else kernel_figures.SMALL).paged_attention
    flash, why = usable(FLASH_ATTENTION_3, torch.device(place.device), shape, ours)
    if flash is None:
        yield left_out("FlashAttention-3", why)
        return
    for tokens in sizes:
        times = []
        for provided in (flash, None):
            figure = kernel_figures.prefill_figure(
                place.device, place.ceilings(), tokens, 0, heads, place.big, provided=provided
            )
            times.append(figure.us)
            yield figure_line(figure)
        what = f"our prefill's time beside FlashAttention-3's, {tokens} tokens"
        yield Line(what, value=times[1] / times[0], headline=True)
