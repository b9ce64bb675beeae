"""How ``splitserve top`` looks: workers, percentiles and recent requests as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .chat import duration

STAGES = {
    "parse": "bright_black",
    "queue": "yellow",
    "prefill": "blue",
    "handoff": "magenta",
    "decode": "green",
    "coordinator": "red",
    "stream": "cyan",
}
USED, LEASED, CACHED = "█", ("magenta", "▓"), ("bright_black", "▒")
WITHOUT_COLOUR = {stage: stage[0] for stage in STAGES} | {"parse": "a"}
"""What a stage's cells are drawn with where a terminal, a file or NO_COLOR shows none."""
LEVELS = {"good": "green", "idle": "dim", "unknown": "dim", "warn": "yellow", "bad": "red"}
RECENT_POINTS = 15
SPARKS = " ▁▂▃▄▅▆▇█"
NUM_FIXED = 21  # lines that are there whatever there is to show


class Picture(NamedTuple):
    """The feed's newest answer, and what has come before it."""

    url: str
    state: dict[str, Any]
    points: Sequence[dict[str, Any]]
    requests: Sequence[dict[str, Any]]


def render(picture: Picture, width: int, height: int, coloured: bool = True) -> RenderableType:
    """Return the whole picture, for ``width`` columns and ``height`` lines. Not ``coloured``: letters take
    the place of colours."""
    workers = picture.state["workers"]
    others = len(workers) + len(picture.state["tenants"][:5]) + 3 * bool(picture.state["steering"])
    room = max(3, height - NUM_FIXED - others)
    finding = _finding(picture.state["findings"][0])
    parts = [_head(picture), finding, _numbers(picture), _workers(workers, width)]
    if picture.state["steering"]:
        parts.append(_steering(picture.state["steering"]))
    parts.append(_latencies(picture.points, width))
    if picture.state["tenants"]:
        parts.append(_tenants(picture.state["tenants"][:5]))
    parts += [_requests(picture.requests[-room:][::-1], width, coloured), Text("q quits", style="dim")]
    return Group(*parts)


def trouble(sentence: str) -> RenderableType:
    """What is shown while there is no data."""
    return Padding(
        Group(Text(sentence, style="red"), Text("It goes on asking; q quits.", style="dim")), (1, 2)
    )


def _head(picture: Picture) -> RenderableType:
    state = picture.state
    ready = "[green]ready[/]" if state["ready"] else "[yellow]not ready[/]"
    words = (
        f"[b]splitserve[/] {escape(state['model'])}  {ready}  up {_age(state['uptime_s'])}  "
        f"[dim]{escape(picture.url)}[/]"
    )
    return Text.from_markup(words, overflow="ellipsis")


def _finding(finding: Mapping[str, str]) -> RenderableType:
    """What is in the way, and what would help."""
    return Text(
        f"{finding['what']} {finding['remedy']}".strip().replace("`", ""), style=LEVELS[finding["level"]]
    )


def _numbers(picture: Picture) -> RenderableType:
    state, recent = picture.state, picture.points[-RECENT_POINTS:]
    prompt, cached = _mean(recent, "prompt"), _mean(recent, "cached")
    rates = {
        "requests/s": f"{_mean(recent, 'requests'):.1f}",
        "output tokens/s": f"{_mean(recent, 'output'):,.0f}",
        "prompt tokens/s": f"{prompt:,.0f} ({cached / prompt if prompt else 0:.0%} cached)",
    }
    counts = {
        "waiting": f"{state['waiting']:,}",
        "prefill": f"{state['stages'].get('prefill', 0):,}",
        "decode": f"{state['stages'].get('handoff', 0) + state['stages'].get('decode', 0):,}",
        "answered": f"{state['num_requests']:,}",
    }
    lines = (
        "   ".join(f"[dim]{name}[/] [b]{value}[/]" for name, value in c.items()) for c in (rates, counts)
    )
    return Text.from_markup("\n".join(lines) + "\n")


def _workers(workers: Sequence[dict[str, Any]], width: int) -> RenderableType:
    if not workers:
        return Text(
            "No workers are connected. `splitserve up` starts some on this machine.\n", style="yellow"
        )
    table = _table("worker", "role", "KV blocks", "used", "cached", "running", "waiting", "")
    bar = max(10, min(40, width - 75))
    for worker in sorted(workers, key=lambda w: (w["role"] != "prefill", w["id"])):
        used, leased, cached, _, total = worker["blocks"]
        colour = STAGES[worker["role"]]
        table.add_row(
            Text(worker["id"]),
            Text(worker["role"], style=colour),
            _bar([((colour, USED), used), (LEASED, leased), (CACHED, cached)], max(1, total), bar),
            f"{used / max(1, total):.0%}",
            f"{cached / max(1, total):.0%}",
            f"{worker['running']:,}",
            f"{worker['waiting']:,}",
            "[yellow]draining[/]" if worker["draining"] else _more(worker, width),
        )
    return Group(table, Text())


def _more(worker: Mapping[str, Any], width: int) -> str:
    """Return the GPU's readings and, where there is room, the number of adapters."""
    gauges, num = worker["gauges"], worker.get("num_adapters", 0) if width >= 100 else 0
    units = {
        "gpu_utilization_ratio": "{:.0%}",
        "gpu_power_watts": "{:.0f} W",
        "gpu_temperature_celsius": "{:.0f} °C",
    }
    readings = [unit.format(gauges[name]) for name, unit in units.items() if name in gauges]
    gpu = [f"GPU {' '.join(readings)}"] if readings else []
    return "  ".join([*gpu, *([f"{num} adapter{'s' * (num > 1)}"] if num else [])])


def _steering(state: Mapping[str, Any]) -> RenderableType:
    """The pool controller: what it sees, and its newest decision."""
    load = state["load"]
    seen = f"load {load['prefill']:.0%} prefill, {load['decode']:.0%} decode" if load else "no prediction"
    lines = [f"pool controller ({state['mode']})  {seen}  {state['state']}"]
    if state["decisions"]:
        newest = state["decisions"][0]
        what = {"flip": f"{newest['worker']} to {newest['role']}", "scale_up": "one worker more"}.get(
            newest["kind"], "one worker fewer"
        )
        lines.append(f"{_age(newest['ago_s'])} ago: {what}: {newest['reason']}")
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines), Text())


def _latencies(points: Sequence[dict[str, Any]], width: int) -> RenderableType:
    table = _table("latency", "p50", "p95", "p99", "p95 over time")
    room = max(10, min(60, width - 60))
    names = {"time to first token": "ttft", "time per output token": "tpot", "end to end": "e2e"}
    for name, key in names.items():
        newest = next((point[key] for point in reversed(points) if point[key]), None)
        cells = [duration(value) for value in newest] if newest else ["–"] * 3
        table.add_row(
            name,
            *cells,
            Text(_sparks([point[key][1] if point[key] else None for point in points[-room:]]), style="blue"),
        )
    return Group(table, Text())


def _tenants(rows: Sequence[dict[str, Any]]) -> RenderableType:
    table = _table("tenant", "requests", "prompt tokens", "cached", "output tokens")
    for row in sorted(rows, key=lambda row: -row["prompt_tokens"] - row["output_tokens"]):
        table.add_row(
            Text(row["tenant"]),
            *(f"{row[key]:,}" for key in ("requests", "prompt_tokens", "cached_tokens", "output_tokens")),
        )
    return Group(table, Text())


def _requests(requests: Sequence[dict[str, Any]], width: int, coloured: bool) -> RenderableType:
    if not requests:
        return Text("No request has ended yet.", style="dim")
    cells = {stage: "█" if coloured else letter for stage, letter in WITHOUT_COLOUR.items()}
    signs = {stage: "■" if coloured else letter for stage, letter in WITHOUT_COLOUR.items()}
    legend = Text.from_markup(
        "  ".join(f"[{colour}]{signs[stage]}[/] [dim]{stage}[/]" for stage, colour in STAGES.items())
    )
    table = _table("request", "status", "by stage", "total", "in", "out")
    table.columns[1].justify = table.columns[2].justify = "left"
    longest, room = max(request["total_s"] for request in requests), max(20, width - 60)
    for request in requests:
        parts = [((STAGES[stage], cells[stage]), end - begin) for stage, begin, end in request["spans"]]
        table.add_row(
            Text(request["id"].rpartition("-")[2][-8:], style="dim"),
            Text(request["status"], style="green" if request["status"] == "200" else "red"),
            _bar(parts, longest, room, rest=" "),
            duration(request["total_s"]),
            f"{request['prompt']:,}",
            f"{request['output']:,}",
        )
    return Group(legend, table)


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for number, header in enumerate(headers):
        table.add_column(
            header,
            justify="left"
            if number == 0 or header in ("role", "KV blocks", "p95 over time", "")
            else "right",
            no_wrap=True,
        )
    return table


def _bar(parts: Sequence[tuple[tuple[str, str], float]], whole: float, width: int, rest: str = "─") -> Text:
    """Parts of a whole, each with its colour and cell; rounded so that their ends lie where they belong."""
    text, done, drawn = Text(), 0.0, 0
    for (colour, cell), amount in parts:
        done += amount
        upto = min(width, round(width * done / whole))
        text.append(cell * (upto - drawn), style=colour)
        drawn = upto
    return text.append(rest * (width - drawn), style="bright_black")


def _sparks(values: Sequence[float | None]) -> str:
    highest = max((value for value in values if value is not None), default=0.0)
    return "".join(
        " " if value is None else SPARKS[max(1, round(8 * value / highest))] if highest else SPARKS[1]
        for value in values
    )


def _mean(points: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(point[key] for point in points) / len(points)) if points else 0.0


def _age(seconds: float) -> str:
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
