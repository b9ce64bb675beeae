"""The Kubernetes chart at work: the rendered pods' commands, probes and hooks, run as processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e import paced
from e2e.cluster import HTTP, MODEL_NAME, Cluster, wait_for
from e2e.test_failure import Streams
from support.kubernetes import HELM, manifests
from support.pods import Pods, can_stand_in

from splitserve.transport.channels.keys import generate_key
from splitserve.transport.process.private_files import write_private

pytestmark = [
    pytest.mark.skipif(not HELM, reason="helm is not installed"),
    pytest.mark.skipif(not can_stand_in(), reason="no namespaces can be made here"),
]
ADMIN_KEY = "0123456789abcdef"
PROMPTS = [f"pod {number}" for number in range(4)]
NUM_TOKENS, STEP_S = 60, 0.1  # six seconds: time to be caught in the middle


class Chart(Cluster):
    """The cluster, by the address of one of its coordinators."""

    def __init__(self, pods: Pods, coordinator: int) -> None:
        pod = pods.running[f"demo-coordinator-{coordinator}"]
        super().__init__(f"http://{pod.address}:8000", pod._process, pod.log)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """Two coordinators, a prefill and two decode workers."""
    folder = tmp_path_factory.mktemp("pods")
    for name in ("cluster", "admin"):
        (folder / name).mkdir()
    generate_key(folder / "cluster" / "cluster.key")
    write_private(folder / "admin" / "admin.key", ADMIN_KEY)
    values = {
        "model": {"name": f"/models/{paced.MODEL.name}", "servedName": MODEL_NAME},
        "coordinator": {"openAccess": True, "endpointsGraceSeconds": 0, "options": {"dead_after_s": 60}},
        "workerOptions": {"runner": paced.paced_runner(folder / "profile.json", 0.01, STEP_S)},
        "pools": {"prefill": {"replicas": 1}},
    }
    paths = {
        "/etc/splitserve/cluster": str(folder / "cluster"),
        "/etc/splitserve/admin": str(folder / "admin"),
        "/models": str(paced.MODEL.parent),
    }
    pods = Pods(manifests(values, folder), folder, paths)
    try:
        pods.start_all()
        yield pods
    finally:
        pods.kill_all()


def state(cluster: Cluster) -> dict[str, int]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = HTTP.get(f"{cluster.url}/debug/state", headers=headers).json()
    return {**answer["counters"], "workers": len(answer["workers"])}


@pytest.fixture(scope="module")
def expected(pods: Pods) -> list[str]:
    """The undisturbed answers, streamed by one coordinator."""
    return Streams(Chart(pods, 0), PROMPTS, NUM_TOKENS, seed=7).texts()


def test_a_chat_is_streamed_by_every_coordinator(pods: Pods) -> None:
    for number in range(2):
        messages = [{"role": "user", "content": "hello"}]
        with Chart(pods, number).client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=5,
            stream=True,
        ) as stream:
            assert any(chunk.choices and chunk.choices[0].delta.content for chunk in stream)
    for pod in pods.running.values():
        assert pod.passes("livenessProbe")


def test_the_preStop_hook_moves_sequences_and_no_token_is_lost(pods: Pods, expected: list[str]) -> None:
    cluster = Chart(pods, 0)
    before = state(cluster)
    streams = Streams(cluster, PROMPTS, NUM_TOKENS, seed=7)
    streams.wait_under_way(3)
    assert pods.running["demo-decode-1"].delete() == 0
    after = state(cluster)
    assert streams.texts() == expected
    assert after["sequences_moved"] > before["sequences_moved"]
    assert after["redispatches"] == before["redispatches"]
    pods.start("demo-decode", 1).wait_ready()


def test_a_rolling_change_of_the_decode_pool_and_a_coordinator_loses_nothing(
    pods: Pods, expected: list[str]
) -> None:
    cluster, other = Chart(pods, 0), Chart(pods, 1)
    before = state(cluster)
    streams = Streams(cluster, PROMPTS, NUM_TOKENS, seed=7)
    of_other = Streams(other, PROMPTS[:1], NUM_TOKENS, seed=7)
    of_other.wait_under_way(3)
    status, successor = pods.replace("demo-coordinator", 1)
    assert status == 0
    assert of_other.texts() == expected[:1], "it has finished what it had"
    for number in (1, 0):
        assert pods.replace("demo-decode", number)[0] == 0
        more = Streams(cluster, PROMPTS, NUM_TOKENS, seed=7)
        more.wait_under_way(3)
        assert streams.texts() == expected
        streams = more
    assert streams.texts() == expected
    assert state(cluster)["redispatches"] == before["redispatches"]
    assert successor.passes("readinessProbe"), "workers have found it by the Service's name"
    wait_for("it has all workers", lambda: state(Chart(pods, 1))["workers"] == 3)
