"""Writes docs/configuration.md from the settings models: ``python -m splitserve.cli.reference``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from .config import SECTIONS, flag_of, variable_of
from .options import bounds, default, metavar

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

This page is generated from the code: `python -m splitserve.cli.reference` writes it.

Every setting can be given in three places. The first that says something wins:

1. a flag: `splitserve decode --max-num-seqs 32`;
2. an environment variable, for one command (`SPLITSERVE_DECODE_MAX_NUM_SEQS=32`) or for every command that has such a setting
   (`SPLITSERVE_MAX_NUM_SEQS=32`);
3. one YAML file, named by `--config FILE` or `SPLITSERVE_CONFIG`, in the section of one command or in `common`:

```yaml
common:
  model: /models/Llama-3.1-8B-Instruct
  key_file: /etc/splitserve/cluster.key
coordinator:
  host: 0.0.0.0
decode:
  max_num_seqs: 32
```

Variables that Kubernetes sets for a Service whose name begins with `splitserve` (`..._SERVICE_HOST`, `..._PORT=tcp://...`) are skipped.
All names in the file and all other variables that begin with `SPLITSERVE_` are checked, whichever command runs: an unknown one is an
error that names the nearest known one. Settings are checked before anything starts, as far as that is possible
without a device, and never change while it runs.

`splitserve up` takes its own settings and those of all roles. A worker option holds for all workers, or for one role with
`--prefill-` or `--decode-` before its name (`--decode-device cuda:1`). On a machine with several GPUs each worker
computes on one of its own, prefill workers first; they share where there are fewer GPUs than workers, which is said at the start. A device
that is named may be several, `--prefill-device cuda:0,cuda:1` (also in a file or a variable, for `up` alone), of which each worker gets
one. `up` decides `name`, `coordinator`, `listen`, `data_listen` and `advertise_host` itself, and gives all workers the coordinator's
`model`, key and `max_model_len`. Without a `key_file` it makes a new key, without a `control_address` it takes a free port, without a
`model` it serves the bundled one.
"""


KEYGEN = """\
## splitserve keygen

`splitserve keygen FILE` makes a new cluster key and writes it to FILE, readable by you alone; a file that is there already it leaves
alone. Every process of the cluster gets it as `key_file`. `--rotate add`, `switch` and `finish` change a key that is in use, one step each
([operations](operations.md)). It has no settings in files or variables.
"""


def main() -> None:
    """Writes the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, KEYGEN, *(_section(name, model) for name, model in SECTIONS.items())])


def _section(name: str, model: type[BaseModel]) -> str:
    summary = " ".join((model.__doc__ or "").split())
    head = f"## splitserve {name.replace('_', ' ')}\n\n{summary}\n\n| setting | value | default | meaning |\n|---|---|---|---|"
    return "\n".join([head, *_rows(name, model), ""])


def _rows(section: str, model: type[BaseModel]) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        kind = metavar(field).strip("[]").replace("|", " \\| ").lower()
        value = ", ".join(part for part in (kind, bounds(field)) if part)
        shown = "needed" if field.is_required() else f"`{text}`" if (text := default(field)) else ""
        setting = f"`{flag_of(name)}`<br>`{variable_of(name, section)}`"
        rows.append(f"| {setting} | {value} | {shown} | {(field.description or '').replace('|', chr(92) + '|')} |")
    return rows


if __name__ == "__main__":
    main()
