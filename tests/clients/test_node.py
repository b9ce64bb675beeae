"""OpenAI's client for Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.http_fakes import ANSWER, CITY

HERE = Path(__file__).parent
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs node: Debian package nodejs")
@pytest.mark.skipif(
    not (HERE / "node_modules" / "openai").is_dir(),
    reason="needs OpenAI's client for Node: npm --prefix tests/clients ci",
)
def test_openai_for_node(base_url: str) -> None:
    run = subprocess.run(
        [str(NODE), str(HERE / "openai_client.mjs"), base_url],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "models": ["tiny"],
        "chat": ANSWER,
        "usage": True,
        "completion": ANSWER,
        "streamed": ANSWER,
        "streamedUsage": True,
        "finalContent": ANSWER,
        "call": {"name": "weather", "arguments": CITY, "inPieces": True},
        "json": json.loads(CITY),
        "indices": [0, 1, 2],
        "error": {
            "status": 400,
            "param": "temperature",
            "type": "invalid_request_error",
            "kind": "BadRequestError",
        },
        "missing": {"status": 404, "code": "model_not_found"},
        "batch": ANSWER,
    }
