"""Write docs/configuration.md from the settings models: ``python -m splitserve.cli.reference``.

Each command that serves has a table. The others are listed with their purpose: ``--help`` has the rest."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from .config import SECTIONS, flag_of
from .options import FILE_ONLY, bounds, default, metavar

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

`python -m splitserve.cli.reference` writes this page from the code.

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

Settings are checked before anything starts, and never change while it runs. An unknown name in the file, or
an unknown variable that begins with `SPLITSERVE_`, is an error that names the nearest known one. Variables
that Kubernetes sets for a Service called `splitserve` are skipped. A file in which a URL has a password or
key must have mode 0600.

`splitserve up` takes its own settings and those of all roles.

- A worker option holds for all workers. With `--prefill-` or `--decode-` before its name it holds for one
  role: `--decode-device cuda:1`.
- Each worker gets GPUs of its own, prefill workers first; with fewer GPUs than that they share.
  `--prefill-device cuda:0,cuda:1` gives one to each worker.
- `up` sets `name`, `coordinator`, `memory_shared_by` and a decode worker's addresses itself. All workers get
  the coordinator's `model`, key and `max_model_len`.
- By default it makes a new key, takes a free control port and serves the bundled model.
"""


SERVING = ("coordinator", "prefill", "decode", "worker", "up")
OTHERS = """\
## Other commands

`splitserve --help` lists them, and `--help` of each its settings, which have names in the file and
variables, too: `trace_make: {rate: 2}`. Pages: [chat](../README.md#start),
[top](observability.md#in-a-terminal), [keygen, doctor](hosts.md), [flip](steering.md#a-role-flip),
[keys, usage](tenants.md), [trace, bench, profile, simulate](planning.md), [plan](choosing_a_ratio.md).
"""


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the whole page as Markdown. An option that several of SERVING share stands under the first of
    them; a later one names it."""
    parts, rows_of = [INTRODUCTION], dict[str, dict[str, str]]()
    for name in SERVING:
        model = SECTIONS[name]
        lines = [f"## {_command(name)}", "", " ".join((model.__doc__ or "").split()), ""]
        rows = rows_of[name] = _rows(model)
        own = dict(rows)
        for other in sorted([*rows_of][:-1], key=lambda other: -_num_shared(rows_of[other], rows)):
            if flags := [flag for flag, row in rows_of[other].items() if own.get(flag) == row]:
                lines += [f"As for `{_command(other)}`: {_shared(flags, rows_of[other])}.", ""]
                own = {flag: row for flag, row in own.items() if flag not in flags}
        if own:
            lines += ["| setting | value | default | meaning |", "|---|---|---|---|", *own.values(), ""]
        parts.append("\n".join(lines))
    return "\n".join([*parts, OTHERS])


def _num_shared(rows: dict[str, str], others: dict[str, str]) -> int:
    return len(rows.items() & others.items())


def _shared(flags: list[str], rows: dict[str, str]) -> str:
    """Return the shared ones of a command's options as text."""
    others = [flag for flag in rows if flag not in flags]
    if len(others) >= len(flags):
        return ", ".join(map(_code, flags))
    return "all of its options" + (f" but {', '.join(map(_code, others))}" if others else "")


def _code(flag: str) -> str:
    return f"`{flag}`"


def _command(section: str) -> str:
    return f"splitserve {section.replace('_', ' ')}"


def _rows(model: type[BaseModel]) -> dict[str, str]:
    """Return one table row for each setting, by flag."""
    rows = {}
    for name, field in model.model_fields.items():
        if name in FILE_ONLY:
            continue
        kind = metavar(field).strip("[]").replace("|", " \\| ").lower()
        value = ", ".join(part for part in (kind, bounds(field)) if part)
        shown = "needed" if field.is_required() else f"`{text}`" if (text := default(field)) else ""
        meaning = (field.description or "").replace("|", chr(92) + "|")
        rows[flag_of(name)] = f"| `{flag_of(name)}` | {value} | {shown} | {meaning} |"
    return rows


if __name__ == "__main__":
    main()
