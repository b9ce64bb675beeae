"""A coordinator ends: a client with an idempotency key has its answer resumed by another one."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from e2e.cluster import HTTP, MODEL_NAME, answers, wait_for
from e2e.forked_cluster import ForkedCluster, forked
from e2e.nursery import Nursery
from transformers import PreTrainedModel

NUM_TOKENS = 2500


@dataclass
class Stream:
    """What a client has read of a stream."""

    text: str = ""
    last_id: str = ""
    finish_reason: str | None = None
    ids: list[str] = field(default_factory=list)

    def read(self, response: httpx.Response) -> Iterator[None]:
        """Take event by event."""
        for line in response.iter_lines():
            if line.startswith("id: "):
                self.last_id = line[4:]
                self.ids.append(self.last_id)
            elif line.startswith("data: {"):
                (choice,) = orjson.loads(line[6:])["choices"]
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"]
                yield


def ask(url: str, prompt: str, headers: dict[str, str], up_to: int | None = None, **more: object) -> Stream:
    """Return the whole stream, or its first events."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        **more,
    }
    stream = Stream()
    with HTTP.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for _ in islice(stream.read(response), up_to):
            pass
        return stream


def read_until_reported(events: Iterator[Any], url: str) -> None:
    """Read until the coordinator at ``url`` knows of the answer. Each worker has sent it two heartbeats since
    the first token; a report of answers follows each. Raises StopIteration if the answer ends before."""
    next(events)
    for _ in range(2):
        since = time.monotonic()
        while time.monotonic() - since <= longest_silence(url):
            next(events)


def longest_silence(url: str) -> float:
    """Return the seconds since the last message of the worker that has been silent longest."""
    return max(worker["silent_s"] for worker in HTTP.get(f"{url}/debug/state").json()["workers"])


def num_resumed(url: str) -> float:
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("splitserve_answers_resumed_t"))


@pytest.fixture(scope="module")
def two(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Path, PreTrainedModel]
) -> Iterator[ForkedCluster]:
    options = ("--exact", "--dtype", "float32", "--kv-cache-gib", "0.1")
    with forked(nursery, tiny[0], tmp_path_factory.mktemp("two"), *options, num_coordinators=2) as cluster:
        yield cluster


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_another_coordinator_resumes_the_answer_of_one_that_has_ended(
    two: ForkedCluster, end: signal.Signals
) -> None:
    first, second = two.urls
    prompt, key = "a story " * 20, {"idempotency-key": end.name}
    sampled = {"temperature": 1.0, "seed": 5}
    whole = ask(second, prompt, {}, **sampled).text

    url = f"{first}/v1/completions"
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    begun = Stream()
    with HTTP.stream("POST", url, json={**body, "stream": True, **sampled}, headers=key) as response:
        events = begun.read(response)  # held: without it the client is gone
        read_until_reported(events, second)
        two.process.send_signal(end)
        two.process.wait(60)
    assert not begun.finish_reason, "it was under way"

    before = num_resumed(second)
    rest = ask(second, prompt, {**key, "last-event-id": begun.last_id}, **sampled)
    again = ask(second, prompt, key, **sampled)
    assert begun.text + rest.text == whole
    assert rest.text != whole
    assert (again.text, again.finish_reason, rest.finish_reason) == (whole, "length", "length")
    wait_for("both are counted", lambda: num_resumed(second) == before + 2)

    short = {"temperature": 1.0, "max_tokens": NUM_TOKENS // 10}
    other = ask(second, prompt, {"idempotency-key": "story-2"}, **short)
    assert not whole.startswith(other.text), "its key is its seed"
    two.process = two.start_coordinator()
    wait_for("the first one is back", lambda: answers(f"{first}/ready"))
    two.wait_whole(2, 2)
    assert ask(first, prompt, {"idempotency-key": "story-2"}, **short).text == other.text
    two.wait_at_rest()


def test_another_coordinator_gives_a_message_again(two: ForkedCluster) -> None:
    first, second = two.urls

    def asked(story: int) -> dict[str, object]:
        turn = {"role": "user", "content": f"story {story}"}
        return {"model": MODEL_NAME, "messages": [turn], "max_tokens": NUM_TOKENS, "temperature": 0}

    def message(story: int, headers: dict[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = HTTP.post(f"{second}/v1/messages", json=asked(story), headers=headers).json()
        return found

    wholes = ((story, message(story, {})) for story in range(30))
    story, whole = next(found for found in wholes if found[1]["usage"]["output_tokens"] == NUM_TOKENS)
    key = {"idempotency-key": "message"}
    streamed = {"json": {**asked(story), "stream": True}, "headers": key}
    with HTTP.stream("POST", f"{first}/v1/messages", **streamed) as response:
        lines = response.iter_lines()
        read_until_reported(lines, second)
        two.process.send_signal(signal.SIGKILL)
        two.process.wait(60)
    before = num_resumed(second)
    again = message(story, key)
    wait_for("it is counted", lambda: num_resumed(second) == before + 1)
    assert again["content"] == whole["content"]
    two.process = two.start_coordinator()
    wait_for("the killed one is back", lambda: answers(f"{first}/ready"))
    two.wait_at_rest()


def test_the_only_coordinator_resumes_it_when_it_is_back(forked_cluster: ForkedCluster) -> None:
    cluster = forked_cluster
    cluster.wait_whole(2, 2)
    url, prompt, key = cluster.url, "a tale " * 30, {"idempotency-key": "tale"}
    whole = ask(url, prompt, {}, temperature=0).text
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    begun = Stream()
    asked = {**body, "stream": True, "temperature": 0}
    with HTTP.stream("POST", f"{url}/v1/completions", json=asked, headers=key) as response:
        events = begun.read(response)
        read_until_reported(events, url)
        cluster.process.send_signal(signal.SIGKILL)
        cluster.process.wait(60)
    cluster.process = cluster.start_coordinator()
    wait_for("the next coordinator serves", cluster.ready)
    cluster.wait_whole(2, 2)
    rest = ask(url, prompt, {**key, "last-event-id": begun.last_id}, temperature=0)
    assert begun.text + rest.text == whole
    wait_for("it is counted", lambda: num_resumed(url) == 1)
    cluster.wait_at_rest()
