"""What goes on beside the streams of a chaos run: batches and usage records on a small disk that becomes
full, and big bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ...cli.settings import DEMO_MODEL_NAME

DISK_MIB = 64
BATCH_LINES = 6
BATCH_EVERY_S = 2.0
PATIENCE_S = 120.0
BIG_BYTES = 16 << 20
CHAT = "/v1/chat/completions"


class SmallDisk:
    """A file system of its own, with the files that a coordinator writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.usage, self._filler = path / "usage.db", path / "filler"

    @property
    def options(self) -> list[str]:
        """A coordinator's."""
        return [
            *("--trace-folder", str(self.path / "traces"), "--batch-file", str(self.path / "batches.db")),
            *("--usage-url", f"sqlite:///{self.usage}"),
        ]

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def metered(self) -> Counter[str]:
        """Usage records by request id."""
        with contextlib.closing(sqlite3.connect(self.usage)) as database:
            return Counter(row[0] for row in database.execute("SELECT id FROM usage"))


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk | None]:
    """None where a file system cannot be mounted: that needs root, or the namespaces of
    ``packet_network``."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class BatchClient:
    """Sends one batch after another and waits for each; a 507 is tried again."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, until: asyncio.Event) -> None:
        async with self._http:
            while not until.is_set():
                await self._one()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), BATCH_EVERY_S)

    async def _one(self) -> None:
        body = {
            "model": DEMO_MODEL_NAME,
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        lines = [
            json.dumps({"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": body})
            for n in range(BATCH_LINES)
        ]
        file = await self._stored(
            "/v1/files", files={"file": ("in.jsonl", "\n".join(lines).encode())}, data={"purpose": "batch"}
        )
        batch = await self._stored(
            "/v1/batches", json={"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        )
        async with asyncio.timeout(PATIENCE_S):
            while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                await asyncio.sleep(0.5)
                batch = (await self._http.get(f"/v1/batches/{batch['id']}")).json()
        counts = batch["request_counts"]
        self.counts[batch["status"]] += 1
        if counts != {"total": BATCH_LINES, "completed": BATCH_LINES, "failed": 0}:
            self.wrong.append(f"{batch['id']} {batch['status']}: {counts}")

    async def _stored(self, path: str, **more: Any) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                response = await self._http.post(path, **more)
                if response.status_code == 200:
                    stored: dict[str, Any] = response.json()
                    return stored
                self.counts[str(response.status_code)] += 1
                if response.status_code != 507 or "no space on the disk" not in response.text:
                    self.wrong.append(f"{path}: {response.status_code} {response.text[:200]}")
                await asyncio.sleep(0.5)


def big_bodies() -> list[bytes]:
    """Bodies of the largest size: biases of a million tokens, and as many prompt ids as fit. Each is an
    error."""
    biases: list[str] = []
    size = 0
    while size < BIG_BYTES - 1024:
        biases.append(f'"{len(biases)}":1')
        size += len(biases[-1]) + 1
    ids = ["7"] * ((BIG_BYTES - 1024) // 2)
    stem = f'{{"model":"{DEMO_MODEL_NAME}","max_tokens":1,'
    return [
        f'{stem}"prompt":"x","logit_bias":{{{",".join(biases)}}}}}'.encode(),
        f'{stem}"prompt":[{",".join(ids)}]}}'.encode(),
    ]


class BigClient:
    """Sends bodies that are far too large for the model, two at once."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)
        self._bodies = big_bodies()
        self.counts: Counter[str] = Counter()
        """By status; "none" where there was no answer."""

    async def send(self) -> None:
        async def one(body: bytes) -> None:
            try:
                response = await self._http.post(
                    "/v1/completions", content=body, headers={"content-type": "application/json"}
                )
                self.counts[str(response.status_code)] += 1
            except httpx.HTTPError:
                self.counts["none"] += 1

        await asyncio.gather(*map(one, self._bodies))

    async def close(self) -> None:
        await self._http.aclose()
