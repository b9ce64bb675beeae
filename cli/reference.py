"""Write docs/configuration.md from the settings models: ``python -m splitserve.cli.reference``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from .config import SECTIONS, flag_of
from .options import bounds, default, metavar

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
WORKERS = ("prefill", "decode", "worker")
INTRODUCTION = """\
# Configuration

This page is generated from the code: `python -m splitserve.cli.reference` writes it.

A setting is taken from the first of these that has it:

1. a flag: `splitserve decode --max-num-seqs 32`;
2. an environment variable, for one command (`SPLITSERVE_DECODE_MAX_NUM_SEQS=32`) or for every command with
   such a setting (`SPLITSERVE_MAX_NUM_SEQS=32`);
3. one YAML file, named by `--config FILE` or `SPLITSERVE_CONFIG`, in the section of one command or in
   `common`:

```yaml
common:
  model: /models/Llama-3.1-8B-Instruct
  key_file: /etc/splitserve/cluster.key
coordinator:
  host: 0.0.0.0
decode:
  max_num_seqs: 32
```

All names in the file and all variables that begin with `SPLITSERVE_` are checked, whichever command runs: an
unknown one is an error that names the nearest known one. (The variables that Kubernetes sets for a Service
called `splitserve` are skipped.) Settings are checked before anything starts, and never change while it runs.
A file in which a URL has a password or key must have mode 0600.

`splitserve up` takes its own settings and those of all roles. A worker option holds for all workers, or for
one role with `--prefill-` or `--decode-` before its name (`--decode-device cuda:1`). Each worker gets a GPU
of its own, prefill workers first; with fewer GPUs than workers they share. `--prefill-device cuda:0,cuda:1`
gives one to each worker. `up` sets `name`, `coordinator`, `listen`, `data_listen` and `advertise_host`
itself, and gives all workers the coordinator's `model`, key and `max_model_len`. By default it makes a new
key, takes a free port and serves the bundled model.
"""


KEYGEN = """\
## splitserve keygen

`splitserve keygen FILE` writes a new cluster key to FILE, readable by you alone; it never overwrites a file.
Every process of the cluster gets it as `key_file`. `--rotate add`, `switch` and `finish` change a key in use
([operations](operations.md#changing-the-cluster-key)).
"""


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page as Markdown."""
    rows = {name: _rows(model) for name, model in SECTIONS.items()}
    shared = [row for row in rows["prefill"] if all(row in rows[worker] for worker in WORKERS)]
    parts = [INTRODUCTION, KEYGEN]
    for name, model in SECTIONS.items():
        if name == WORKERS[0]:
            parts.append(
                _section("All workers", "Options of `prefill`, `decode` and `worker` alike.", shared)
            )
        own = [row for row in rows[name] if name not in WORKERS or row not in shared]
        parts.append(
            _section(f"splitserve {name.replace('_', ' ')}", " ".join((model.__doc__ or "").split()), own)
        )
    return "\n".join(parts)


def _section(title: str, summary: str, rows: list[str]) -> str:
    head = f"## {title}\n\n{summary}\n\n| setting | value | default | meaning |\n|---|---|---|---|"
    return "\n".join([head, *rows, ""])


def _rows(model: type[BaseModel]) -> list[str]:
    """One table row for each setting."""
    rows = []
    for name, field in model.model_fields.items():
        kind = metavar(field).strip("[]").replace("|", " \\| ").lower()
        value = ", ".join(part for part in (kind, bounds(field)) if part)
        shown = "needed" if field.is_required() else f"`{text}`" if (text := default(field)) else ""
        meaning = (field.description or "").replace("|", chr(92) + "|")
        rows.append(f"| `{flag_of(name)}` | {value} | {shown} | {meaning} |")
    return rows


if __name__ == "__main__":
    main()
