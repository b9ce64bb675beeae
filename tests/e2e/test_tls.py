"""`splitserve up` with a certificate: it waits for its coordinator and asks it over TLS, whatever name the
certificate has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.certificates import write_certificate


def test_up_speaks_tls_with_its_own_coordinator(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "llm.example")
    command = [sys.executable, "-m", "splitserve.cli", "up", "--port", "0", "--prompt", "def f("]
    run = subprocess.run(
        [*command, "--tls-cert", str(certificate), "--tls-key", str(key)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
