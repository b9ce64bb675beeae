"""A page to scrub through a simulation: every worker's KV cache and queue at any time. One file, no
network."""

from __future__ import annotations

from pathlib import Path

import orjson

from .timeline import Timeline

PAGE = Path(__file__).with_name("view.html")


def write_view(path: Path, timeline: Timeline) -> None:
    """Writes the page."""
    content = orjson.dumps(
        {"names": timeline.names, "samples": timeline.samples}, option=orjson.OPT_SERIALIZE_DATACLASS
    )
    text = content.decode().replace("</", "<\\/")  # no end tag inside the script
    path.write_text(PAGE.read_text(encoding="utf-8").replace("__DATA__", text), encoding="utf-8")
