"""``splitserve up`` with several models: each pool's workers are of one of them."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from splitserve.cli import launch as launching
from splitserve.cli.config import ConfigError, Sources, Value
from splitserve.cli.extras import EXTRAS
from splitserve.cli.local_cluster import commands
from splitserve.cli.settings import DEMO_MODEL
from splitserve.cli.up import Plan, plan

SMALL = {"model": str(DEMO_MODEL), "served_model_name": "small,little", "max_model_len": 64}
PREFILL, DECODE = ({"role": role, "count": 1, "model": "small"} for role in ("prefill", "decode"))


def planned(
    tmp_path: Path,
    pools: list[dict[str, Any]],
    *others: dict[str, Any],
    port: int = 0,
    model: Path | None = None,
    host: str = "",
    **up: Any,
) -> Plan:
    file = tmp_path / "up.yaml"
    content = {"coordinator": {"other_models": list(others)}, "up": {"pools": pools, **up}}
    file.write_text(yaml.safe_dump({**content, "common": {"device": "cpu"}}))
    flags = {"run_dir": Value(tmp_path / "run", "--run-dir"), "port": Value(port, "--port")}
    if host:
        flags |= {"host": Value(host, "--host"), "open_access": Value(True, "--open-access")}
    if model is not None:
        flags["model"] = Value(model, "--model")
    return plan(flags, Sources.read(file, {}))


def test_workers_connect_to_their_models_address(tmp_path: Path) -> None:
    made = planned(tmp_path, [PREFILL, {**DECODE, "model": "little"}], SMALL)
    (other,) = made.coordinator.other_models
    assert other.control_address != made.coordinator.control_address
    assert not other.control_address.endswith(":0")
    of_other = [worker for worker in made.workers if worker.coordinator == other.control_address]
    assert [worker.name for worker in of_other] == ["prefill-1", "decode-1"]
    assert [worker.max_model_len for worker in of_other] == [64, 64]
    assert {worker.coordinator for worker in made.workers} == {
        other.control_address, made.coordinator.control_address
    }  # fmt: skip
    assert made.models == ["splitserve-demo", "small"]
    assert "splitserve-demo and small" in made.summary


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([PREFILL], "no decode workers of small"),
        ([PREFILL, {**DECODE, "count": 0}], "no decode workers of small"),
        ([], "no prefill workers of small"),
        ([PREFILL, {**DECODE, "model": "large"}], "no model 'large'; .* has splitserve-demo, small"),
    ],
)
def test_a_model_without_workers_is_refused(
    tmp_path: Path, pools: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, pools, SMALL)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"other_models: small: .*nowhere"):
        planned(tmp_path, [PREFILL, DECODE], {**SMALL, "model": str(tmp_path / "nowhere")})


def test_pools_name_a_model_of_the_hub_as_requests_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "snapshots" / "0123"
    shutil.copytree(DEMO_MODEL, fetched)
    monkeypatch.setattr("splitserve.cli.model_source._from_hub", lambda *_: fetched)
    more = {"model": "org/demo", "count": 1}
    made = planned(tmp_path, [{"role": "mixed", **more}, PREFILL, DECODE], SMALL, model=Path("org/demo"))
    assert made.models == ["org/demo", "small"]
    assert made.workers[-3].coordinator == made.coordinator.control_address


@pytest.mark.parametrize("on", ["slurm", "ray"])
def test_workers_elsewhere_find_the_port_of_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    asked: dict[str, Any] = {}
    actors = SimpleNamespace(RayActors=lambda *_, **given: asked.update(given))
    monkeypatch.setitem(sys.modules, "splitserve.deploy.ray_actors", actors)
    monkeypatch.setitem(EXTRAS, "ray", ())
    monkeypatch.setattr(launching, "SlurmJobs", lambda *given: asked.update(ports=given[3]))
    other = {**SMALL, "control_address": "tcp://0.0.0.0:7710"}
    made = planned(tmp_path, [PREFILL, DECODE], other, port=8000, on=on, stop=True)
    launching.launcher_of(made)
    assert asked["ports"] == {"prefill-0": 7700, "decode-0": 7700, "prefill-1": 7710, "decode-1": 7710}
    assert not asked.get("scales"), "a worker that Ray adds is a copy of the first model's"


def test_elsewhere_each_model_needs_a_port(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control_address of small needs a port"):
        planned(tmp_path, [PREFILL, DECODE], SMALL, port=8000, on="slurm", stop=True)


@pytest.mark.parametrize(("pairs", "others"), [((1, 1), (1, 1)), ((1, 4), (4, 1)), ((2, 2), (1, 3))])
def test_a_roll_to_a_build_that_fits_no_older_one_waits_for_no_pair_of_two_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: tuple[int, int], others: tuple[int, int]
) -> None:
    pools = [{**pool, "count": count} for pool, count in zip((PREFILL, DECODE), others, strict=True)]
    other = {**SMALL, "control_address": "tcp://0.0.0.0:7710"}
    prefill, decode = pairs
    elsewhere = {"on": "slurm", "prefill": prefill, "decode": decode, "ready_timeout_s": 0.2}
    made = planned(tmp_path, pools, other, port=8000, host="0.0.0.0", **elsewhere)
    old = commands(made)
    roles = {worker.name: worker.role for worker in made.workers}
    rolled: list[str] = []

    async def known(*_: object) -> dict[str, int]:
        return {command.name: rolled.count(command.name) for command in old}

    async def serves(*_: object) -> bool:
        builds = {(w.coordinator, w.name in rolled, w.role) for w in made.workers}
        return all(
            any({(model, new, role) for role in ("prefill", "decode")} <= builds for new in (False, True))
            for model in {worker.coordinator for worker in made.workers}
        )

    monkeypatch.setattr(launching, "incarnations", known)
    monkeypatch.setattr(launching, "is_ready", serves)
    monkeypatch.setattr(launching, "POLL_S", 0.01)
    launcher: Any = SimpleNamespace(restart=lambda name, *_: rolled.append(name), log_of=lambda name: name)
    asyncio.run(launching._roll(made, launcher, "http://127.0.0.1:1", old, roles))
    assert sorted(rolled) == sorted(command.name for command in old)
    assert rolled[-1] == "coordinator"
