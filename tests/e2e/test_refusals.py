"""Bodies and workers that are refused in a sentence."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from e2e.cluster import HTTP, MODEL_NAME, START_S, Cluster, answers, free_port, wait_for
from e2e.nursery import Nursery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny import Tiny

from splitserve.coordinator.lifecycle.limits import LifecycleLimits

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "prompt",
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "logprobs",
    "logit_bias",
    "stream",
    "seed",
    "top_p",
    "model",
)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5))
def test_nonsense_is_refused_in_openais_words(cluster: Cluster, body: dict[str, object]) -> None:
    answer = HTTP.post(f"{cluster.url}/v1/completions", json={"model": MODEL_NAME, "max_tokens": 2, **body})
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.status_code != 422
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def of_other_pieces(model: Path, folder: Path) -> Path:
    """The same checkpoint, in which two pieces have changed places."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    first, second, *_ = pieces
    pieces[first], pieces[second] = pieces[second], pieces[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@contextmanager
def coordinator(nursery: Nursery, model: Path, folder: Path) -> Iterator[tuple[str, list[str], Path]]:
    """A coordinator alone: its URL, the options of workers that are to find it, and its log."""
    port, control, log = free_port(), f"tcp://127.0.0.1:{free_port()}", folder / "log"
    argv = ["coordinator", "--model", str(model), "--insecure"]
    process = nursery.start([*argv, "--port", str(port), "--control-address", control], log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for("the HTTP server answers", lambda: answers(f"{url}/health"), START_S)
        yield url, ["--insecure", "--coordinator", control, "--kv-cache-gib", "0.05"], log
    finally:
        status = process.end(signal.SIGTERM)
    assert status == 0


@contextmanager
def workers(nursery: Nursery, log: Path, *commands: tuple[str, list[str]]) -> Iterator[None]:
    """Workers of these roles, with these options, until the block ends."""
    with ExitStack() as stack:
        for role, argv in commands:
            stack.callback(nursery.start([role, *argv], log).end, signal.SIGTERM)
        yield


def test_a_coordinator_alone_answers_503_at_once_and_serves_when_workers_come(
    nursery: Nursery, tiny: Tiny, tmp_path: Path
) -> None:
    with coordinator(nursery, tiny[0], tmp_path) as (url, options, log):
        body = {"model": tiny[0].name, "prompt": "x", "max_tokens": 2}
        start = time.monotonic()
        refused = HTTP.post(f"{url}/v1/completions", json=body)
        assert time.monotonic() - start < LifecycleLimits().unserved_s, "no wait for a worker"
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        ours = ["--model", str(tiny[0]), *options]
        unlike = ["--model", str(of_other_pieces(tiny[0], tmp_path / "other")), *options]
        with workers(nursery, log, ("decode", unlike)):
            why = "its tokenizer.json has another vocabulary than the coordinator's"
            wait_for("both know", lambda: log.read_text().count(why) >= 2, START_S)
            assert why in HTTP.post(f"{url}/v1/completions", json=body).json()["error"]["message"]
            with workers(nursery, log, ("prefill", ours), ("decode", ours)):
                wait_for("ready", lambda: answers(f"{url}/ready"), START_S)
                assert HTTP.post(f"{url}/v1/completions", json=body).status_code == 200


def test_workers_of_different_block_sizes_are_refused_in_a_sentence(
    nursery: Nursery, tiny: Tiny, tmp_path: Path
) -> None:
    with coordinator(nursery, tiny[0], tmp_path) as (url, options, log):

        def sentence() -> str:
            answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            message: str = answer.json()["error"]["message"]
            return message

        ours = ["--model", str(tiny[0]), *options, "--block-size"]
        with workers(nursery, log, ("prefill", [*ours, "16"]), ("decode", [*ours, "32"])):
            wait_for(
                "both workers are compared",
                lambda: "do not fit together: their block size differs (16 and 32)" in sentence(),
                START_S,
            )
            wait_for("the log says so too", lambda: b"gets no work: it does not fit" in log.read_bytes())
