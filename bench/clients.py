"""Writes down what `deploy/test_clients.sh --json FILE` has run: each test of a client with its outcome, and
the clients' versions.

    python -m splitserve.bench.clients ours.xml others.xml --openai 3.52.0 --json bench/results/clients.json

The files are pytest's reports (``--junitxml``). Ends with status 1 where a test was skipped: then not all
clients were there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from .environment import environment, option_parser, write_record

NODE_CLIENT = Path("tests/clients/node_modules/openai/package.json")
TRIALS, NODE_TRIALS = Path("deploy/trials.txt"), Path("tests/clients/trials/package.json")
OF_PYTHON = ("litellm", "langchain-openai", "schemathesis")


class Outcome(NamedTuple):
    test: str
    outcome: str
    seconds: float


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument(
        "--openai", required=True, help="the version that the tests of OpenAI's own client ran with"
    )
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    found = [outcome for report in options.reports for outcome in outcomes(report.read_text())]
    record = {
        "environment": {**environment(), "command": f"deploy/test_clients.sh --json {options.json}"},
        "clients": {"openai": options.openai, **{name: version(name) for name in OF_PYTHON}, **_node()},
        "trials": trials(TRIALS.read_text(), NODE_TRIALS.read_text()),
        "passed": sum(each.outcome == "passed" for each in found),
        "not_passed": [each.test for each in found if each.outcome != "passed"],
        "tests": [each._asdict() for each in found],
    }
    write_record(options.json, record)
    return 1 if record["not_passed"] else 0


def outcomes(report: str) -> list[Outcome]:
    """Outcomes of the tests in a report in JUnit's XML."""
    cases = ElementTree.fromstring(report).iter("testcase")
    return [
        Outcome(f"{case.get('classname')}.{case.get('name')}", _outcome(case), float(case.get("time", 0)))
        for case in cases
    ]


def trials(requirements: str, package: str) -> dict[str, dict[str, str]]:
    """Versions of the clients that tests/clients/test_trials.py runs. Each version is fixed."""
    fixed = re.findall(r"([\w-]+)(?:\[[^]]*])?==(\S+)", requirements)
    return {"python": dict(fixed), "node": json.loads(package)["dependencies"]}


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return next((tag for tag in ("failure", "error", "skipped") if tag in tags), "passed")


def _node() -> dict[str, str]:
    """Node, and OpenAI's client for it, where they are here."""
    if not NODE_CLIENT.exists():
        return {}
    node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {"node": node, "openai for node": str(json.loads(NODE_CLIENT.read_text())["version"])}


if __name__ == "__main__":
    sys.exit(main())
