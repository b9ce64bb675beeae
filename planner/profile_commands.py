"""``splitserve profile``: measures how long a worker's steps take on this machine, or imports what others
have published."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..engine.latency_profile import Contention, Memory, Numerics, Power, Profile, Residuals
from ..engine.settings import ComputeSettings, WorkerSettings
from ..traces.console import figures_table, result_console
from .errors import PlannerError
from .profile.design import Bounds, experiments
from .profile.imported import imported
from .profile.published import import_published
from .settings import ProfileSettings

if TYPE_CHECKING:
    from ..engine.worker_model import WorkerModel
    from .profile.measure import Repeats

PRECISION = 0.02
"""A step is measured until its time is known to this share of itself (95%), if the budget allows."""
SEED = 0
"""Order of the steps, and which of them test the fit."""
NUMERICS = ("dtype", "kv_dtype", "quantization", "exact")
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.completed}/{task.total}"),
    TimeElapsedColumn(),
)


def profile(settings: ProfileSettings) -> int:
    """The command. Returns its exit status; raises PlannerError and EngineError."""
    console = result_console()
    if settings.model is not None:
        made = _measured(settings, settings.model, console)
    else:
        assert settings.published is not None, "one of the two is given"
        made = published(settings, settings.published, console)
        if settings.name:
            made = made.model_copy(update={"name": settings.name})
    made.write(settings.output)
    show(made, console)
    console.print(f"wrote {settings.output}")
    return 0


def published(settings: ProfileSettings, path: Path, console: Console) -> Profile:
    """Import a profile, and print sentences about it. Raises PlannerError and EngineError."""
    if settings.like is None:
        ranks = settings.tensor_parallel_size
        return import_published(path, settings.published_model, settings.hardware, ranks)
    made, sentences = imported(path, Profile.read(settings.like))
    for line in sentences:
        console.print(line, highlight=False)
    return made


def show(profile: Profile, console: Console) -> None:
    """Print the profile's main numbers."""
    table = figures_table("step", "ms", "error", "95%", "worst", "points")
    for label, model, sizes in (
        ("prefill, {} tokens", profile.prefill, (1, 128, 512, 2048)),
        ("decode, {} x 256 tokens", profile.decode, (1, 8, 32, 64)),
    ):
        for i, size in enumerate(sizes):
            reads = size * (size + 1) / 2 if model is profile.prefill else 256 * size
            seconds = model.seconds(size, reads, 1 if model is profile.prefill else size)
            outside = " *" if model.outside(size, reads, 1) else ""
            errors = _errors(model.residuals) if i == 0 else ("",) * 4
            table.add_row(label.format(size) + outside, f"{1e3 * seconds:,.2f}", *errors)
    console.print(profile.name, table, "* extrapolated; error: of the fit, on average", sep="\n")
    if profile.numerics is not None:
        console.print(f"computed in {numerics_words(profile.numerics)}", highlight=False)
    for name, handoff in (profile.movers or {"": profile.handoff}).items():
        rate, put, message = handoff.bytes_per_s / 1e9, 1e3 * handoff.put_s, 1e3 * handoff.message_s
        by, piece = f" by {name}" if name else "", f"{1e6 * handoff.slice_s:.1f} µs a block of some layers"
        console.print(
            f"handoff{by}: {rate:.2f} GB/s, {put:.3f} ms a put, {piece}, {message:.3f} ms a message"
        )
    for line in contention_words(profile.contention):
        console.print(line, highlight=False)
    if profile.start_s or profile.flip_s is not None:
        flip = f", a change of role {1e3 * profile.flip_s:.1f} ms" if profile.flip_s is not None else ""
        console.print(f"from the start of a process to being ready: {profile.start_s:.1f} s{flip}")


def numerics_words(numerics: Numerics) -> str:
    """In one line."""
    parts: list[str] = [numerics.dtype]
    parts += [f"KV cache in {numerics.kv_dtype}"] * (numerics.kv_dtype != "auto")
    if numerics.quantization != "none":
        parts.append(f"linear layers in {numerics.quantization.replace('fp8', 'float8')}")
    return ", ".join(parts + ["exact"] * numerics.exact)


def contention_words(contention: Contention | None) -> list[str]:
    """A line for each pair of roles; none where nothing was measured."""
    if contention is None:
        return []
    lines = []
    for role in ("prefill", "decode"):
        for neighbour in ("prefill", "decode"):
            name = f"{role}_beside_{neighbour}"
            least_most = contention.ranges.get(name)
            by_shape = f" ({least_most[0]:.2f} to {least_most[1]:.2f})" if least_most else ""
            lines.append(
                f"a {role} step beside {neighbour} steps takes {getattr(contention, name):.2f} "
                f"times as long{by_shape}"
            )
    return lines


def _errors(residuals: Residuals | None) -> tuple[str, ...]:
    if residuals is None:
        return ("",) * 4
    return (
        f"{residuals.mean:.1%}",
        f"{residuals.p95:.1%}",
        f"{residuals.worst:.1%}",
        str(residuals.num_points),
    )


def _measured(settings: ProfileSettings, folder: Path, console: Console) -> Profile:
    from ..engine.load_model import load_model
    from ..worker.settings import FlexibleSettings
    from .profile.flip import measure_flip
    from .profile.handoff import measure_movers
    from .profile.measure import decode_loop_s, fitted, measure, noise_cv

    shared = {name: getattr(settings, name) for name in ComputeSettings.model_fields}
    worker = WorkerSettings(model=folder, insecure=True, **shared)
    model = load_model(
        worker, max_decode_seqs=settings.max_num_seqs, prefill_tokens=lambda _: settings.max_batch_tokens
    )
    if model.identity.state_blocks:
        raise PlannerError(
            "a model with recurrent layers cannot be profiled yet: the planner knows no memory that a "
            "sequence takes however long it is"
        )
    start_s = time.time() - psutil.Process().create_time()
    block_size, block_bytes = model.identity.block_size, model.identity.block_bytes
    ranks = settings.tensor_parallel_size
    bounds = Bounds(
        settings.max_batch_tokens, settings.max_num_seqs, model.max_model_len, model.num_blocks, block_size
    )
    designed = experiments(bounds, SEED)
    with Progress(*COLUMNS, console=console) as bar:
        task = bar.add_task("steps known well enough", total=len(designed))

        def progress(num_known: int) -> None:
            bar.update(task, completed=num_known)

        found = measure(model.runner, block_size, designed, PRECISION, settings.budget_s, progress, SEED)
    prefill, decode = fitted(found, "prefill", bounds), fitted(found, "decode", bounds)
    for role, model_of_role in (("prefill", prefill), ("decode", decode)):
        if (off := model_of_role.held_out) is not None:
            console.print(
                f"{role} steps that were not fitted to: off by {off.mean:.1%} on average, "
                f"{off.worst:.1%} at worst"
            )
    contention = _contention(settings, worker, model, bounds, console)
    loop_s = decode_loop_s(min(16, settings.max_num_seqs))
    movers = measure_movers(block_bytes, model.num_layers, PRECISION)
    batch = {"max_batch_tokens": settings.max_batch_tokens, "max_num_seqs": settings.max_num_seqs}
    flip_s = measure_flip(
        model, FlexibleSettings.model_validate({"model": folder, "insecure": True, **batch, **shared})
    )
    power = _power(model, ranks, found, block_size)
    made = Profile(
        name=settings.name
        or f"{folder.resolve().name} on {model.device}{f' tp{ranks}' if ranks > 1 else ''}",
        hardware=settings.hardware,
        gpus=ranks,
        expert_parallel=settings.expert_parallel,
        source=f"measured: {sum(len(r.times) for r in found)} steps of {len(found)} kinds",
        numerics=_numerics(settings, model),
        memory=Memory(
            block_size=block_size,
            num_blocks=model.num_blocks,
            block_bytes=block_bytes,
            num_layers=model.num_layers,
            max_model_len=model.max_model_len,
        ),
        prefill=prefill,
        decode=decode,
        prefill_loop_s=loop_s,
        decode_loop_s=loop_s,
        handoff=movers["shm"],
        movers=movers,
        start_s=start_s,
        flip_s=flip_s,
        noise_cv=noise_cv(found),
        contention=contention,
        power=power,
    )
    if settings.plot_file is not None:
        from .profile.plot import draw_fit

        draw_fit(settings.plot_file, made, found, contention_words(made.contention))
    return made


def _numerics(settings: ProfileSettings, model: WorkerModel) -> Numerics | None:
    """None where nothing was computed."""
    if settings.runner != "model":
        return None
    return Numerics.model_validate(
        {name: getattr(settings, name) for name in NUMERICS} | {"dtype": model.identity.dtype}
    )


def _contention(
    settings: ProfileSettings, worker: WorkerSettings, model: WorkerModel, bounds: Bounds, console: Console
) -> Contention | None:
    """None where workers do not share processor cores, or nothing was to be measured."""
    from .profile.contention import MAX_ROUNDS, by_roles, contention_of, measure_contention, shapes
    from .profile.neighbour import NeighbourProcess

    if model.device.type != "cpu" or settings.runner != "model" or not settings.contention_s:
        return None
    cores = len(os.sched_getaffinity(0))
    threads = cores if settings.threads == "auto" else settings.threads
    if cores < 2 * threads:
        console.print(
            f"contention was not measured: two workers of {threads} threads need more "
            f"than the {cores} cores here"
        )
        return None
    measured = shapes(bounds)
    with NeighbourProcess(worker, bounds, measured) as neighbour, Progress(*COLUMNS, console=console) as bar:
        task = bar.add_task("rounds beside a neighbour", total=MAX_ROUNDS)

        def progress(num_rounds: int) -> None:
            bar.update(task, completed=num_rounds)

        found = measure_contention(
            model.runner,
            neighbour,
            bounds.block_size,
            measured,
            PRECISION,
            settings.contention_s,
            progress,
            SEED,
        )
    uncertain = max(uncertainty for _, _, uncertainty, _ in by_roles(found))
    console.print(
        f"contention is known to {uncertain:.1%} of a step's time alone (95%), by "
        f"{len(found[0].ratios)} rounds"
    )
    return contention_of(found)


def _power(model: WorkerModel, ranks: int, found: Sequence[Repeats], block_size: int) -> Power | None:
    """Watts in the largest steps of each role; None if no driver reports power."""
    from ..worker.gpu_telemetry import telemetry_of
    from .profile.measure import batch_of
    from .profile.power import measure_power

    telemetry = telemetry_of(model.device, ranks)
    if telemetry is None:
        return None
    largest = {
        role: max((r.experiment for r in found if r.experiment.role == role), key=lambda e: e.units)
        for role in ("prefill", "decode")
    }
    prefill, decode = (batch_of(largest[role], block_size) for role in ("prefill", "decode"))
    try:
        return measure_power(
            telemetry, lambda: model.runner.execute(prefill), lambda: model.runner.execute(decode)
        )
    finally:
        telemetry.stop()
