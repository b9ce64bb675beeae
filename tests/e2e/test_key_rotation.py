"""The cluster key is changed under streams, by the three steps of docs/operations.md: none is lost or comes
out different."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from e2e import paced
from e2e.cluster import NEVER_DEAD, Cluster, running, wait_for

from splitserve.cli.main import cli
from splitserve.transport.channels.keys import generate_key, load_key

NUM_TOKENS, DECODE_STEP_S, NUM_STREAMS = 60, 0.05, 2
RENEWED_WITHIN_S = 120.0  # two processes that start one after the other
FOLLOWED, RENEWED = "the cluster key has changed: ", "rolling restart: every worker is new"
STEPS = {"add": "two are accepted for now", "switch": "two are accepted for now", "finish": "one is accepted"}


def pids(cluster: Cluster) -> dict[str, int]:
    return {w["worker_id"]: w["pid"] for w in cluster.state()["workers"]}


def restart_workers(cluster: Cluster, times: int) -> None:
    """For the so-many-th time, one after the other."""
    before = pids(cluster)
    cluster.process.send_signal(signal.SIGUSR1)
    wait_for(
        "both workers are new", lambda: cluster.log.read_text().count(RENEWED) == times, RENEWED_WITHIN_S
    )
    now = pids(cluster)
    assert now.keys() == before.keys()
    assert all(now[name] != pid for name, pid in before.items())


@pytest.mark.timeout(600)  # a start, and six of workers
def test_the_key_is_changed_under_streams(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    old = generate_key(key_file)
    runner = paced.paced_runner(tmp_path / "profile.json", 0.01, DECODE_STEP_S)
    with running(
        paced.MODEL, tmp_path, "--key-file", str(key_file), "--runner", runner, *NEVER_DEAD
    ) as cluster:
        undisturbed = "".join(cluster.stream("key", NUM_TOKENS, seed=7))
        coordinator = cluster.state()["coordinator"]
        enough = threading.Event()

        def stream_until_enough() -> int:
            count = 0
            while not enough.is_set():
                assert "".join(cluster.stream("key", NUM_TOKENS, seed=7)) == undisturbed
                count += 1
            return count

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(stream_until_enough) for _ in range(NUM_STREAMS)]
            try:
                for number, (step, expected) in enumerate(STEPS.items(), 1):
                    reported = CliRunner().invoke(cli, ["keygen", str(key_file), "--rotate", step])
                    assert reported.exit_code == 0, reported.output
                    wait_for(
                        f"the coordinator follows {step}",
                        lambda n=number: cluster.log.read_text().count(FOLLOWED) == n,
                    )  # type: ignore[misc]
                    assert cluster.log.read_text().rpartition(FOLLOWED)[2].startswith(expected)
                    restart_workers(cluster, number)
            finally:
                enough.set()
            assert all(stream.result() >= len(STEPS) for stream in streams)
        assert cluster.state()["coordinator"] == coordinator, "it was never restarted"
        assert cluster.state()["counters"]["workers_lost"] == 0, cluster.log.read_text()
        new = load_key(key_file)
        assert (new.second, new.public != old.public) == (None, True)
        cluster.wait_at_rest()
