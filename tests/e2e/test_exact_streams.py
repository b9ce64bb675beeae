"""With --exact, what a client receives is the same to the last bit whether a worker was killed in mid-stream
or not, whether tokens were drafted or not, and among how many ranks the model is split."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for
from transformers import PreTrainedModel

NUM_TOKENS = 150
UNDER_WAY = 5  # pieces of each stream before the kill
SAMPLED = {"temperature": 1.2, "seed": 7, "top_p": 0.95, "min_p": 0.01}
PENALTIES = {
    "presence_penalty": 0.1,
    "frequency_penalty": 0.01,
    "repetition_penalty": 1.02,
    "logit_bias": {"65": 1.0},
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy, logprobs": {"prompt": "once upon", "temperature": 0, "logprobs": 3},
    "sampled, three choices": {"prompt": "a time " * 9, "n": 3, "logprobs": 1, **SAMPLED},
    "sampled, penalties": {"prompt": "there was " * 20, "logprobs": 2, **SAMPLED, **PENALTIES},
    "nearly greedy, logit bias": {
        "prompt": "so on " * 30,
        **SAMPLED,
        "temperature": 0.4,
        "logit_bias": {"65": 1},
    },
    "greedy, long prompt": {"prompt": [(i * 13 + i // 7) % 250 for i in range(700)], "temperature": 0},
}
Answer = dict[int, dict[str, Any]]
"""By choice: its text, finish reason and columns of logprobs. (How many tokens come in one event is a matter
of timing.)"""


ARGUMENTS = (
    "--exact",
    "--dtype",
    "bfloat16",
    "--prefill",
    "2",
    "--decode",
    "2",
    "--kv-cache-gib",
    "0.1",
    *NEVER_DEAD,
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Path, PreTrainedModel]) -> Iterator[Cluster]:
    with running(
        tiny[0], tmp_path_factory.mktemp("exact"), *ARGUMENTS, "--decode-num-speculative-tokens", "0"
    ) as cluster:
        yield cluster


class Streams:
    """All of the bodies at once."""

    def __init__(self, cluster: Cluster, bodies: dict[str, dict[str, Any]]) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(len(bodies))
        self.counts = dict.fromkeys(bodies, 0)
        self._futures = {name: self._pool.submit(self._read, name, body) for name, body in bodies.items()}

    def _read(self, name: str, body: dict[str, Any]) -> Answer:
        asked = {"model": MODEL_NAME, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **body}
        answer: Answer = {}
        with HTTP.stream("POST", f"{self._cluster.url}/v1/completions", json=asked) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.counts[name] += 1
                        _add(answer.setdefault(choice["index"], {"text": "", "finish_reason": None}), choice)
        return answer

    def wait_under_way(self) -> None:
        """Or at their end: a slow reader gets many tokens in one event."""

        def under_way() -> bool:
            return all(
                self.counts[name] >= UNDER_WAY or future.done() for name, future in self._futures.items()
            )

        wait_for("all streams are under way", under_way)

    def answers(self) -> dict[str, Answer]:
        answers = {name: future.result(200) for name, future in self._futures.items()}
        self._pool.shutdown()
        return answers


def _add(answer: dict[str, Any], choice: dict[str, Any]) -> None:
    answer["text"] += choice["text"]
    answer["finish_reason"] = choice["finish_reason"]
    for column, values in (choice["logprobs"] or {}).items():
        answer.setdefault(column, []).extend(values)


@pytest.fixture(scope="module")
def bodies(exact: Cluster) -> dict[str, dict[str, Any]]:
    """With one more: a stop string from late in an answer."""
    body = BODIES["sampled, penalties"]
    text = Streams(exact, {"": body}).answers()[""][0]["text"]
    return {**BODIES, "stop string": {**body, "stop": [text[len(text) * 2 // 3 :][:12]]}}


@pytest.fixture(scope="module")
def expected(exact: Cluster, bodies: dict[str, dict[str, Any]]) -> dict[str, Answer]:
    """Without faults, one at a time: nothing shares a batch."""
    answers = {name: Streams(exact, {name: body}).answers()[name] for name, body in bodies.items()}
    assert answers["stop string"][0]["finish_reason"] == "stop"
    assert len(answers["greedy, logprobs"][0]["token_logprobs"]) == NUM_TOKENS
    assert sorted(answers["sampled, three choices"]) == [0, 1, 2]
    return answers


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_changes_no_bit(
    exact: Cluster, bodies: dict[str, dict[str, Any]], expected: dict[str, Answer], role: str
) -> None:
    exact.wait_whole(2, 2)
    streams = Streams(exact, bodies)
    streams.wait_under_way()
    victim = exact.busy_worker(role)
    os.kill(victim["pid"], signal.SIGKILL)
    answers = streams.answers()
    for name in bodies:
        assert answers[name] == expected[name], name
    exact.wait_whole(2, 2)
    exact.wait_at_rest()


@pytest.fixture(scope="module")
def drafting(
    tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Path, PreTrainedModel]
) -> Iterator[Cluster]:
    """Blocks go from two ranks to four, and two of these hold the same heads."""
    more = ["--decode-num-speculative-tokens", "4"]
    more += ["--prefill-tensor-parallel-size", "2", "--decode-tensor-parallel-size", "4"]
    with running(tiny[0], tmp_path_factory.mktemp("drafting"), *ARGUMENTS, *more) as cluster:
        yield cluster


def test_drafts_and_ranks_change_no_bit(
    drafting: Cluster, bodies: dict[str, dict[str, Any]], expected: dict[str, Answer]
) -> None:
    """Alone, all at once, and with a decode worker killed."""
    drafting.wait_whole(2, 2)
    for name, body in bodies.items():
        assert Streams(drafting, {name: body}).answers()[name] == expected[name], name
    drafted, accepted = (_count(drafting, f"{what}_tokens") for what in ("draft", "accepted"))
    assert drafted > accepted > 50
    streams = Streams(drafting, bodies)
    streams.wait_under_way()
    os.kill(drafting.busy_worker("decode")["pid"], signal.SIGKILL)
    answers = streams.answers()
    for name in bodies:
        assert answers[name] == expected[name], name
    drafting.wait_whole(2, 2)
    drafting.wait_at_rest()


def _count(cluster: Cluster, counter: str) -> float:
    """Sum it over all workers, once they have reported."""
    cluster.wait_reported()
    text = HTTP.get(f"{cluster.url}/metrics").text
    found = re.findall(rf"^splitserve_worker_{counter}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found
    return sum(map(float, found))
