"""``splitserve up --on``: what runs becomes what is wanted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.cli import launch as launching
from splitserve.cli.config import ConfigError, Sources, Value
from splitserve.cli.extras import EXTRAS
from splitserve.cli.launch import launch, launcher_of
from splitserve.cli.local_cluster import commands
from splitserve.cli.up import Plan, plan
from splitserve.deploy.errors import LaunchError


class Launched:
    """A cluster manager that writes down what it is asked."""

    def __init__(self, *running: str, fails: str = "") -> None:
        self.names, self.calls, self.fails = list(running), list[str](), fails

    def running(self) -> list[str]:
        return [name for name in self.names if name != self.fails]

    def start(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.names.append(name)
        self.calls.append(f"start {name} as {role}")

    def stop(self, names: Sequence[str]) -> None:
        self.names = [name for name in self.names if name not in names]
        self.calls += [f"stop {name}" for name in names]

    def restart(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.calls.append(f"restart {name} as {role}")

    def misfits(self) -> bool:
        """Whether no prefill worker has a decode worker's build: what starts again has another, whose
        KV cache has another name."""
        new = [name for name in self.names if any(call.startswith(f"restart {name} ") for call in self.calls)]
        old = [name for name in self.names if name not in new]
        return bool(new) and not any(
            {"prefill", "decode"} <= {name.partition("-")[0] for name in build} for build in (new, old)
        )

    def host(self, deadline: float) -> str:
        return "192.0.2.3"

    def log_of(self, name: str) -> str:
        return f"less {name}.log"


def planned(tmp_path: Path, **given: Any) -> Plan:
    options = {"on": "slurm", "run_dir": tmp_path / "run", "open_access": True, "host": "0.0.0.0", **given}
    flags = {name: Value(value, f"--{name}") for name, value in options.items() if value is not None}
    return plan(flags, Sources.read(None, {}))


def launched(
    monkeypatch: pytest.MonkeyPatch, made: Plan, manager: Launched, *, ready: bool = True
) -> list[str]:
    async def is_ready(url: str, *_: object) -> bool:
        assert url == f"http://192.0.2.3:{made.coordinator.port}"
        return ready and not manager.misfits()

    monkeypatch.setattr(launching, "is_ready", is_ready)
    monkeypatch.setattr(launching, "launcher_of", lambda _: manager)
    assert launch(made) == 0
    return manager.calls


def test_everything_starts_the_coordinator_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = launched(monkeypatch, planned(tmp_path, decode=2), Launched())
    assert calls == [
        "start coordinator as coordinator",
        "start decode-0 as decode",
        "start prefill-0 as prefill",
        "start decode-1 as decode",
    ]


def test_other_numbers_add_and_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Launched("coordinator", "prefill-0", "decode-0", "decode-1")
    calls = launched(monkeypatch, planned(tmp_path, prefill=2), manager)
    assert calls == ["stop decode-1", "start prefill-1 as prefill"]


def test_workers_of_a_lost_coordinator_start_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = launched(monkeypatch, planned(tmp_path), Launched("prefill-0", "decode-0"))
    assert calls[:3] == ["stop prefill-0", "stop decode-0", "start coordinator as coordinator"]


def test_stop_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = launched(
        monkeypatch, planned(tmp_path, stop=True, open_access=False), Launched("coordinator", "decode-0")
    )
    assert calls == ["stop coordinator", "stop decode-0"]


def test_a_roll_waits_for_each_process_and_takes_the_coordinator_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Launched("coordinator", "prefill-0", "decode-0")
    seen: list[str] = []

    async def incarnations(*_: object) -> dict[str, int]:
        """A process that starts again is seen to be gone before it is back."""
        again = [call.split()[1] for call in manager.calls if call.startswith("restart")]
        gone = again[-1:] if seen != again else []
        seen[:] = again
        return {name: again.count(name) for name in manager.names if name not in gone}

    monkeypatch.setattr(launching, "incarnations", incarnations)
    monkeypatch.setattr(launching, "POLL_S", 0.01)
    calls = launched(monkeypatch, planned(tmp_path, decode=2, roll=True), manager)
    assert calls == [
        "start decode-1 as decode",
        *(f"restart {name} as {name.partition('-')[0]}" for name in ("decode-0", "prefill-0", "coordinator")),
    ], "what is new stays"
    manager.names.remove("prefill-0")
    monkeypatch.setattr(manager, "restart", lambda *_: manager.names.remove("decode-0"))
    with pytest.raises(LaunchError, match=r"decode-0 is not back after 0\.1 s, .* less decode-0\.log"):
        launched(monkeypatch, planned(tmp_path, decode=2, roll=True, ready_timeout_s=0.1), manager)


@pytest.mark.parametrize("size", [1, 2])
def test_a_roll_to_a_build_whose_kv_cache_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A new prefill worker serves once a decode worker is new, too: roles take turns."""
    pairs = [f"{role}-{i}" for i in range(size) for role in ("decode", "prefill")]
    manager = Launched("coordinator", *pairs)

    async def incarnations(*_: object) -> dict[str, int]:
        return {
            name: sum(call.startswith(f"restart {name} ") for call in manager.calls) for name in manager.names
        }

    monkeypatch.setattr(launching, "incarnations", incarnations)
    monkeypatch.setattr(launching, "POLL_S", 0.01)
    calls = launched(
        monkeypatch, planned(tmp_path, prefill=size, decode=size, roll=True, ready_timeout_s=60), manager
    )
    assert [call.split()[1] for call in calls[:2]] == ["prefill-0", "decode-0"]
    assert len(calls) == 2 * size + 1


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 4), (4, 1), (3, 2), (2, 6)])
@pytest.mark.parametrize("flexible", [False, True])
def test_while_any_worker_is_rolled_a_pair_of_one_build_serves(
    tmp_path: Path, prefill: int, decode: int, flexible: bool
) -> None:
    """Workers of two builds may not fit each other. (While a lone worker is away, its role is.)"""
    made = planned(tmp_path, prefill=prefill, decode=decode, flexible=flexible)
    roles = {worker.name: getattr(worker, "start_as", worker.role) for worker in made.workers}
    order = [roles[command.name] for command in commands(made) if command.name in roles]
    assert sorted(order) == sorted(roles.values())
    for place, away in enumerate(order):
        new, old = set(order[:place]), set(order[place + 1 :])
        assert order.count(away) == 1 or 2 in (len(new), len(old)), (order, place)


def test_what_cannot_start_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"decode-0 could not start; its log: less decode-0\.log"):
        launched(monkeypatch, planned(tmp_path), Launched(fails="decode-0"), ready=False)
    with pytest.raises(LaunchError, match=r"not ready after 0\.1 s; see less coordinator\.log"):
        launched(monkeypatch, planned(tmp_path, ready_timeout_s=0.1), Launched(), ready=False)


def test_workers_elsewhere_listen_for_other_hosts(tmp_path: Path) -> None:
    made = planned(tmp_path, device="auto", decode=2)
    assert made.coordinator.control_address == "tcp://0.0.0.0:7700"
    assert [worker.device for worker in made.workers] == ["auto"] * 3, "the cluster manager deals GPUs out"
    assert [worker.listen for worker in made.workers] == ["tcp://0.0.0.0:*"] * 3


def test_ray_gives_a_worker_cores_and_gpus_for_each_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    actors = SimpleNamespace(RayActors=lambda *_, **given: asked.update(given))
    monkeypatch.setitem(sys.modules, "splitserve.deploy.ray_actors", actors)
    monkeypatch.setitem(EXTRAS, "ray", ())
    launcher_of(planned(tmp_path, on="ray", threads=3, device="cuda", decode_tensor_parallel_size=4))
    assert asked["num_cpus"] == {"prefill-0": 3, "decode-0": 12}
    assert asked["ranks"] == {"prefill-0": 1, "decode-0": 4}
    assert asked["devices"] == {"prefill-0": "cuda", "decode-0": "cuda"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run_dir": None}, "--on slurm needs --run-dir"),
        ({"open_access": False}, "clients come from other hosts"),
        ({"prompt": "Hello"}, "instead of --chat and --prompt"),
        ({"control_address": "tcp://0.0.0.0:0"}, "--control-address needs a port"),
        ({"on": "here", "stop": True}, "--stop is for"),
        ({"on": "here", "roll": True}, "--roll is for"),
        ({"roll": True, "stop": True}, "give one of them"),
        ({"on": "here", "sbatch": "-p gpu"}, "--sbatch is for --on slurm"),
        ({"ray_decode": "H100=1"}, "--ray-decode is for --on ray"),
        ({"on": "ray", "ray_decode": "H100"}, "'H100' cannot be used"),
        ({"on": "ray"}, r"pip install 'splitserve\[ray\]'"),
    ],
)
def test_what_cannot_work_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(EXTRAS, "ray", ("ray_that_is_not_there",))
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, **given)
