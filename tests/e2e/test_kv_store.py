"""What the caches have evicted comes back from the KV store with the same bits, also after a
restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import MODEL_NAME, Cluster, running, wait_for
from support.played_bucket import played_bucket
from support.s3_server import s3_server
from transformers import PreTrainedModel

BLOCK, NUM_TOKENS = 16, 20
DOCUMENTS = [[(7 * i + number) % 250 + 3 for i in range(300)] for number in range(5)]


def ask(cluster: Cluster, number: int) -> tuple[list[int], int]:
    """Return the answer's tokens, and how many of the document's were cached."""
    more = {"ignore_eos": True, "return_token_ids": True}
    answer = cluster.client.completions.create(
        model=MODEL_NAME,
        prompt=DOCUMENTS[number],
        max_tokens=NUM_TOKENS,
        temperature=1.0,
        seed=7,
        extra_body=more,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    tokens = answer.choices[0].model_dump()["token_ids"]
    return tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def counted(cluster: Cluster, name: str) -> float:
    return sum(worker["counters"].get(name, 0) for worker in cluster.state()["workers"])


class Folder:
    """The folder of blocks, as this test looks into it."""

    def __init__(self, path: Path) -> None:
        self.path, self.option = path, str(path)

    def names(self) -> list[str]:
        return sorted(str(path) for path in self.path.glob(f"kv-*/??/{'?' * 32}"))

    def cut(self, name: str) -> None:
        Path(name).write_bytes(Path(name).read_bytes()[:-1])


class Bucket:
    """The same of an object store."""

    option = "s3://blocks/team"

    def __init__(self, client: Any) -> None:
        self._client = client

    def names(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket="blocks", Prefix="team/kv-")
        names = (each["Key"] for page in pages for each in page.get("Contents", ()))
        return sorted(name for name in names if not name.endswith("/opened"))

    def cut(self, name: str) -> None:
        body = self._client.get_object(Bucket="blocks", Key=name)["Body"].read()
        self._client.put_object(Bucket="blocks", Key=name, Body=body[:-1])


@pytest.fixture(params=["folder", "s3"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Folder | Bucket]:
    if request.param == "folder":
        yield Folder(tmp_path / "store")
        return
    with s3_server(monkeypatch, "blocks") as client:
        yield Bucket(client)


def renew_workers(cluster: Cluster) -> None:
    """Have each worker leave, and start again with an empty cache."""
    old = [worker["pid"] for worker in cluster.state()["workers"]]
    for pid in old:
        os.kill(pid, signal.SIGTERM)
    wait_for("they have left", lambda: not {w["pid"] for w in cluster.state()["workers"]} & set(old))
    cluster.wait_whole(1, 1)


def test_evicted_blocks_are_read_back(
    tiny: tuple[Path, PreTrainedModel], tmp_path: Path, store: Folder | Bucket
) -> None:
    arguments = ["--kv-store", store.option, "--run-dir", str(tmp_path / "run"), "--exact"]
    arguments += ["--num-blocks", "48", "--max-model-len", "512"]
    numbers = range(len(DOCUMENTS))
    with running(tiny[0], tmp_path, *arguments) as cluster:
        expected, num_full = list[tuple[list[int], int]](), 0
        for number in numbers:
            expected.append(ask(cluster, number))
            num_full += (300 + NUM_TOKENS - 1) // BLOCK  # the last token has no KV
            wait_for("all is saved, before any is evicted", lambda num=num_full: len(store.names()) == num)
        assert {cached for _, cached in expected} == {0}
        for number in numbers:
            cluster.wait_reported()
            assert ask(cluster, number) == (expected[number][0], 18 * BLOCK)
        cluster.wait_reported()
        assert counted(cluster, "loaded_tokens") >= 2 * 18 * BLOCK, "at least what two caches cannot hold"
        cluster.wait_at_rest()
        for name in store.names()[::7]:
            store.cut(name)
        renew_workers(cluster)
        again = [ask(cluster, number) for number in numbers]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]
        assert sum(cached for _, cached in again) > 0
        cluster.wait_reported()
        assert counted(cluster, "loaded_tokens") == sum(cached for _, cached in again)
        cluster.wait_at_rest()
    assert "is damaged: it is removed" in (tmp_path / "up.log").read_text()


def test_the_next_start_reads_from_an_object_store_and_one_that_hangs_costs_no_answer(
    tiny: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--kv-store", "s3://blocks", "--run-dir", str(tmp_path / "run"), "--exact"]
    with played_bucket(tmp_path, monkeypatch) as bucket:
        with running(tiny[0], tmp_path, *options) as cluster:
            expected = [ask(cluster, number) for number in range(2)]
            wait_for("all is saved", lambda: len(bucket.objects) == 2 * ((300 + NUM_TOKENS - 1) // BLOCK))
        with running(tiny[0], tmp_path, *options) as cluster:
            assert [ask(cluster, number) for number in range(2)] == [
                (tokens, 18 * BLOCK) for tokens, _ in expected
            ]
            renew_workers(cluster)
            bucket.gate.clear()
            assert [ask(cluster, number) for number in range(2)] == expected, "computed again"
            assert bucket.held, "it was asked"
            cluster.wait_at_rest()
