"""The coordinator as a front door: what a request costs before it is dispatched, how many streams and
requests a second it holds.

    python -m splitserve.bench.http.front_door [--seconds 60] [--processes 2] [--only admission] \\
        [--json bench/results/front_door.json]

    admission   key, validation, template, tokens, limits, journal: from a complete call to its
                submission, in this process, with the coordinator's event loop and collector settings
    streams     10,000 open streams on one coordinator process, and some tokens to each of them
    sustained   1,700 requests a second (100,000 a minute) over several processes on one port, against fake
                workers that answer at once
    streamed    tokens a second with keys, limits, metering and tracing on, and without, in turn

The server runs on the first core (several processes: on all cores), this process with clients and fake
workers on the last one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from ...coordinator.tenants.store import TenantStore
from ..environment import environment, option_parser, write_record
from .front_door_admission import admission
from .front_door_requests import sustained
from .front_door_streams import streamed, streams
from .raw_client import allow_many_files
from .streaming_servers import model_folder


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the sustained load")
    parser.add_argument("--processes", type=int, default=2, help="coordinator processes under it")
    parser.add_argument(
        "--only", choices=["admission", "streams", "sustained", "streamed"], help="measure this alone"
    )
    options = parser.parse_args()
    allow_many_files()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        tenants, key = tenants_file(Path(folder))
        parts: dict[str, Callable[[], Any]] = {
            "admission": lambda: uvloop.run(admission(model, tenants, key)),
            "streams": lambda: streams(model, tenants, key, cores),
            "sustained": lambda: sustained(model, tenants, key, cores, options.processes, options.seconds),
            "streamed": lambda: streamed(model, tenants, key, cores),
        }
        results = {"environment": environment()} | {
            name: part() for name, part in parts.items() if options.only in (None, name)
        }
    print(json.dumps(results, indent=1))
    write_record(options.json, results)


def tenants_file(folder: Path) -> tuple[Path, str]:
    """One tenant with every limit there is, none of which is ever reached, and its key."""
    store, much = TenantStore(folder / "tenants", create=True), 1 << 49
    limits = {
        "requests_per_minute": much,
        "tokens_per_minute": much,
        "max_streams": much,
        "tokens_per_day": much,
    }
    store.set_tier("bench", "standard", limits)
    store.set_tenant("bench", tier="bench")
    key = store.create_key("bench", limits={"requests_per_minute": much, "tokens_per_month": much}).key
    store.close()
    return folder / "tenants", key


if __name__ == "__main__":
    main()
