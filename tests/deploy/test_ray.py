"""Actors on a real Ray of one node; on several nodes: tests/clusters/ray_trial.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ray = pytest.importorskip("ray", reason="needs splitserve[ray]")
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own

from e2e.cluster import free_port  # noqa: E402

from splitserve.deploy.errors import LaunchError  # noqa: E402
from splitserve.deploy.ray_actors import RayActors  # noqa: E402

RAY = str(Path(sys.executable).parent / "ray")
PROCESS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("drained", file=open(sys.argv[1] + ".end", "w")), sys.exit()))
print(os.environ["SPLITSERVE_COORDINATOR"], os.environ["OURS"], *sys.argv[2:], file=open(sys.argv[1], "a"))
with open(sys.argv[1] + ".pid", "w") as file: file.write(str(os.getpid()))
time.sleep(600)
"""


@contextmanager
def node(*options: str) -> Iterator[None]:
    """A node of two CPUs."""
    command = [RAY, "start", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
    process = subprocess.Popen(
        [*command, "--node-ip-address=127.0.0.1", "--disable-usage-stats", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray of this test's own."""
    port = free_port()
    with node(
        "--head", f"--port={port}", "--include-dashboard=false", "--num-gpus=4", '--resources={"H100": 1}'
    ):
        yield f"127.0.0.1:{port}"
        ray.shutdown()


@pytest.fixture
def actors(address: str, tmp_path: Path) -> Iterator[RayActors]:
    ray.shutdown()
    (tmp_path / "cluster.key").write_text("secret")
    for name in ("decode-0", "decode-1"):
        (tmp_path / f"{name}.yaml").write_text("decode: {}")
    deadline = time.monotonic() + 60
    while True:
        try:
            further = {"decode-0": {"H100": 0.25}, "wide": {"H100": 2}}
            ranks, devices = {"decode-0": 2}, {"decode-0": "cuda"}
            made = RayActors(
                tmp_path,
                7701,
                address=address,
                leave_s=20,
                resources=further,
                ranks=ranks,
                devices=devices,
                ports={"decode-0": 7710},
            )
            break
        except LaunchError:
            assert time.monotonic() < deadline
    yield made
    made.stop(made.running())


def start(actors: RayActors, folder: Path, name: str, program: str = PROCESS) -> None:
    argv = ["python", "-c", program, str(folder / name)]
    actors.start(name, "decode", argv, {**os.environ, "OURS": "given"})


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pid_of(file: Path) -> int:
    """A process that starts again writes the file anew: it is empty for a moment."""
    text = ""

    def written() -> str:
        nonlocal text
        text = file.read_text() if file.exists() else ""
        return text

    wait_for(written)
    return int(text)


def test_ray_restarts_a_process_that_dies_and_a_worker_that_leaves_drains(
    actors: RayActors, tmp_path: Path
) -> None:
    start(actors, tmp_path, "decode-0")
    first = pid_of(tmp_path / "decode-0.pid")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: pid_of(tmp_path / "decode-0.pid") != first)
    lines = (tmp_path / "decode-0").read_text().splitlines()
    second = pid_of(tmp_path / "decode-0.pid")
    os.kill(psutil.Process(second).ppid(), signal.SIGTERM)
    wait_for(lambda: pid_of(tmp_path / "decode-0.pid") != second)
    assert (tmp_path / "decode-0.end").read_text() == "drained\n"
    (tmp_path / "decode-0.end").unlink()
    assert lines == [f"tcp://{actors.host(0)}:7710 given"] * 2, (
        "each found the coordinator by the head's address"
    )
    assert ray.available_resources()["H100"] == 0.75, "its own"
    assert ray.available_resources()["GPU"] == 2, "one for each of its ranks"
    assert actors.add("decode") == "decode-1", "of the settings of decode-0"
    pid_of(tmp_path / "decode-0.pid")
    wait_for(lambda: "--name decode-1" in (tmp_path / "decode-0").read_text())
    (tmp_path / "decode-0.pid").unlink()
    argv = ["python", "-c", PROCESS, str(tmp_path / "decode-0"), "rolled"]
    actors.restart("decode-0", "decode", argv, {**os.environ, "OURS": "given"})
    assert (tmp_path / "decode-0.end").read_text() == "drained\n"
    (tmp_path / "decode-0.end").unlink()
    pid_of(tmp_path / "decode-0.pid")
    assert (tmp_path / "decode-0").read_text().endswith("given rolled\n"), "with its new settings"
    actors.stop(["decode-1", "decode-0"])
    assert (tmp_path / "decode-0.end").read_text() == "drained\n"
    wait_for(lambda: actors.running() == [])
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}


def test_a_worker_drains_with_its_node_and_starts_again_on_another(
    actors: RayActors, address: str, tmp_path: Path
) -> None:
    (head,) = (row["NodeID"] for row in ray.nodes() if row["Alive"])
    other = f"--address={address}", '--resources={"H100": 9}'
    (tmp_path / "wide.yaml").write_text("mixed: {}")
    with node(*other):
        wait_for(lambda: ray.cluster_resources()["H100"] == 10)
        leaving = next(row["NodeID"] for row in ray.nodes() if row["Alive"] and row["NodeID"] != head)
        actors.start("wide", "mixed", ["python", "-c", PROCESS, str(tmp_path / "wide")], {"OURS": "given"})
        first = pid_of(tmp_path / "wide.pid")
        drain = [RAY, "drain-node", f"--address={address}", f"--node-id={leaving}", "--reason-message=test"]
        drain += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds=600"]
        subprocess.run(drain, check=True, capture_output=True, timeout=60)
        wait_for((tmp_path / "wide.end").exists)
        with node(*other):  # the first one has ten minutes left
            wait_for(lambda: pid_of(tmp_path / "wide.pid") != first)
            assert actors.running() == ["wide"]
            actors.stop(["wide"])


def test_a_process_that_cannot_start_or_has_ended_is_not_started_again(
    actors: RayActors, tmp_path: Path
) -> None:
    for name, status in (("decode-0", 2), ("decode-1", 0)):
        start(actors, tmp_path, name, f"import sys; open(sys.argv[1], 'a').write('x'); sys.exit({status})")
    wait_for(lambda: actors.running() == [])
    assert [(tmp_path / name).read_text() for name in ("decode-0", "decode-1")] == ["x", "x"]


def test_without_ray_the_message_has_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    ray.shutdown()
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(LaunchError, match=r"start one by `ray start --head`, or name one by RAY_ADDRESS"):
        RayActors(tmp_path, 7701)
