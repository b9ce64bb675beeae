"""docs/api.md names the clients that are tried, with the versions that deploy/test_clients.sh installs."""

from __future__ import annotations

import re
from pathlib import Path

from splitserve.bench.clients import NODE_TRIALS, TRIALS, trials

ROOT = Path(__file__).resolve().parents[2]
WITH_OTHERS = {"@langchain/core", "ai", "esbuild", "zod"}  # parts of other rows' clients


def test_the_page_has_the_versions_that_are_installed() -> None:
    tried = trials((ROOT / TRIALS).read_text(), (ROOT / NODE_TRIALS).read_text())
    names = {f"`{name}`": version for name, version in tried["python"].items()}
    names |= {f"`{name}` (Node)": v for name, v in tried["node"].items() if name not in WITH_OTHERS}
    page = (ROOT / "docs/api.md").read_text().partition("## Clients")[2]
    assert dict(re.findall(r"^\| (`.*?) \| (\d\S+) \|", page, re.M)) == names
    assert {"openai", "aider-chat"} < tried["python"].keys()
