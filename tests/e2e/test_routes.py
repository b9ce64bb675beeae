"""New weights are rolled out behind a route, and taken back, while streams run: no request fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

import yaml
from e2e.cluster import HTTP, MODEL_NAME, Cluster, running, wait_for
from e2e.paced import MODEL, paced_runner

NEW = "new"
NUM_STREAMS, NUM_TOKENS = 16, 24
ROLLOUT = (1, 10, 50, 100, 0)
"""Percent of the new model; at last it is taken back."""


class Answered(NamedTuple):
    began: float
    models: frozenset[str]  # by its chunks
    num_tokens: int


class Streams:
    """Clients that ask again and again, each time in a new conversation."""

    def __init__(self, cluster: Cluster) -> None:
        self.answered: list[Answered] = []
        self.failed: list[Exception] = []
        self._cluster, self._stopping = cluster, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def since(self, began: float) -> set[str]:
        """Return the models of requests that have begun since then, once there are enough."""
        wait_for("more answers", lambda: len(self._begun_since(began)) >= NUM_STREAMS or bool(self.failed))
        return {model for each in self._begun_since(began) for model in each.models}

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _begun_since(self, began: float) -> list[Answered]:
        return [each for each in list(self.answered) if each.began >= began]

    def _run(self, number: int) -> None:
        count = 0
        while not self._stopping.is_set() and not self.failed:
            began, count = time.monotonic(), count + 1
            try:
                chunks = list(
                    self._cluster.client.completions.create(
                        model="chat",
                        prompt="Hi",
                        user=f"{number} {count}",
                        stream=True,
                        max_tokens=NUM_TOKENS,
                        stream_options={"include_usage": True},
                        extra_body={"ignore_eos": True},
                    )
                )
                usage = chunks[-1].usage
                num_tokens = 0 if usage is None else usage.completion_tokens
                self.answered.append(Answered(began, frozenset(c.model for c in chunks), num_tokens))
            except Exception as error:
                self.failed.append(error)


def test_a_rollout_fails_no_request(tmp_path: Path) -> None:
    routes, config = tmp_path / "routes.yaml", tmp_path / "cluster.yaml"
    write(routes, 0)
    pools = [{"role": role, "count": 1, "model": NEW} for role in ("prefill", "decode")]
    other = {"model": str(MODEL), "served_model_name": NEW}
    config.write_text(yaml.safe_dump({"coordinator": {"other_models": [other]}, "up": {"pools": pools}}))
    runner = paced_runner(tmp_path / "profile.json", prefill_step_s=0.005, decode_step_s=0.005)
    arguments = ("--config", str(config), "--routes-file", str(routes), "--runner", runner)
    with running(MODEL, tmp_path, *arguments) as cluster:
        streams = Streams(cluster)
        try:
            assert streams.since(0.0) == {MODEL_NAME}
            for percent in ROLLOUT:
                write(routes, percent)
                cluster.wait_log(f"the routes file has changed: chat: {MODEL_NAME} {100 - percent}, ")
                if percent == 100:
                    assert streams.since(time.monotonic()) == {NEW}
            assert streams.since(time.monotonic()) == {MODEL_NAME}, "taken back"
        finally:
            streams.stop()
        assert streams.failed == []
        assert {each.num_tokens for each in streams.answered} == {NUM_TOKENS}
        by_new = [each for each in streams.answered if NEW in each.models]
        assert by_new
        assert all(len(each.models) == 1 for each in streams.answered)
        counted = metric(cluster, "splitserve_route_requests_total")
        assert counted[f'{{model_name="{NEW}",route="chat"}}'] == len(by_new)
        wait_for("a copy was compared", lambda: '{result="same",route="chat"}' in shadows(cluster))
        assert shadows(cluster).keys() <= {
            f'{{result="{each}",route="chat"}}' for each in ("same", "dropped")
        }
        cluster.wait_at_rest()


def write(file: Path, percent: int) -> None:
    """Replace the file."""
    shares = {MODEL_NAME: 100 - percent, NEW: percent}
    route = {"name": "chat", "shares": shares, "shadow": NEW, "shadow_percent": 50}
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"routes": [route]}, sort_keys=False))
    new.replace(file)


def shadows(cluster: Cluster) -> dict[str, float]:
    return metric(cluster, "splitserve_shadow_total")


def metric(cluster: Cluster, name: str) -> dict[str, float]:
    """Return its values by labels."""
    lines = HTTP.get(f"{cluster.url}/metrics").text.splitlines()
    found = [line.removeprefix(name).split(" ") for line in lines if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, value in found}
