"""Workers change their roles in place while streams run: no token is lost, doubled or different, and their
caches go on serving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for
from e2e.test_failure import Streams
from transformers import PreTrainedModel

from splitserve.cli.main import cli

NUM_TOKENS = 1500  # enough that some of it is left to move
CAUGHT_WITHIN_S = 200.0  # on a machine where the observer waits longer for a core than the worker
PROMPTS = [f"flip {i} " + "uvw" * (11 * i) for i in range(4)]


@pytest.fixture(scope="module")
def flexible(
    tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Three workers: one begins as a prefill worker, two as decode workers."""
    arguments = (
        "--flexible",
        "--prefill",
        "1",
        "--decode",
        "2",
        "--kv-cache-gib",
        "0.1",
        "--exact",
        "--dtype",
        "float32",
        *NEVER_DEAD,
    )
    with running(tiny[0], tmp_path_factory.mktemp("flexible"), *arguments) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(flexible: Cluster) -> list[str]:
    """The undisturbed answers."""
    return Streams(flexible, PROMPTS, NUM_TOKENS).texts()


def flip(cluster: Cluster, process: str, to: str) -> dict[str, Any]:
    answer = HTTP.post(f"{cluster.url}/admin/flip/{process}", params={"to": to})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def newest(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.state()["flips"][-1]
    return found


def test_a_decode_worker_becomes_a_prefill_worker_and_back_under_load(
    flexible: Cluster, expected: list[str]
) -> None:
    flexible.wait_whole(1, 2)
    before = flexible.state()["counters"]

    def moved() -> bool:
        flips = flexible.state()["counters"]["flips"]
        for role, num_prefill, num_decode in (("prefill", 2, 1), ("decode", 1, 2)):
            streams = Streams(flexible, PROMPTS, NUM_TOKENS)
            streams.wait_under_way()
            busiest = flexible.busy_worker("decode") if role == "prefill" else flexible.busy_worker("prefill")
            pid = busiest["pid"]
            flip(flexible, busiest["process"], role)
            wait_for("it has begun in its new role", lambda: newest(flexible)["began_s"] is not None)
            assert streams.texts() == expected
            flexible.wait_whole(num_prefill, num_decode)
            assert pid in [w["pid"] for w in flexible.workers(role)], "it is the same process"
            flexible.wait_at_rest()
        after = flexible.state()["counters"]
        assert after["flips"] == flips + 2
        assert after["workers_lost"] == before["workers_lost"]
        return bool(after["sequences_moved"] > before["sequences_moved"])

    wait_for("it was caught in the middle of some, and they moved", moved, CAUGHT_WITHIN_S)


def test_what_it_has_cached_in_one_role_it_has_in_the_other(flexible: Cluster) -> None:
    flexible.wait_whole(1, 2)
    flexible.wait_reported()
    prompt = [(i * 17 + i // 5) % 250 for i in range(1600)]
    before = {w["worker_id"]: w["cached_hashes"] for w in flexible.workers("decode")}
    text = flexible.complete(prompt, 8)
    flexible.wait_reported()
    [holder] = [w for w in flexible.workers("decode") if w["cached_hashes"] >= before[w["worker_id"]] + 100]
    first = flexible.workers("prefill")[0]["process"]
    flip(flexible, holder["process"], "prefill")
    flexible.wait_whole(2, 1)
    flip(flexible, first, "decode")
    flexible.wait_whole(1, 2)
    # It computed the prompt, so it gets the request: once it has reported its cache.
    wait_for(
        "its cache is known",
        lambda: any(w["process"] == first and w["cached_hashes"] >= 100 for w in flexible.workers("decode")),
    )
    answer = flexible.client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1584, "all full blocks but the last token's"
    assert newest(flexible)["worked_s"] is not None


def test_the_command(flexible: Cluster) -> None:
    flexible.wait_whole(1, 2)
    prefill, decode = flexible.workers("prefill")[0], flexible.workers("decode")[0]
    command = CliRunner()

    def splitserve(*arguments: str) -> tuple[int, str]:
        result = command.invoke(cli, [*arguments, "--url", flexible.url])
        return result.exit_code, f"{result.output}{result.exception}"

    status, message = splitserve("flip", prefill["process"], "--to", "decode")
    assert (status, "last prefill worker" in message) == (1, True), message
    assert splitserve("flip", "nobody", "--to", "decode")[0] == 1
    status, message = splitserve("flip", decode["process"], "--to", "prefill")
    assert (status, f"{decode['process']} is a prefill worker" in message) == (0, True), message
    flexible.wait_whole(2, 1)
    assert "is a prefill worker already" in splitserve("flip", decode["process"], "--to", "prefill")[1]
