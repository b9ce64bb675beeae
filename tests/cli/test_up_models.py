"""``splitserve up`` with several models: each pool's workers are of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from splitserve.cli.config import ConfigError, Sources, Value
from splitserve.cli.settings import DEMO_MODEL
from splitserve.cli.up import Plan, plan

SMALL = {"model": str(DEMO_MODEL), "served_model_name": "small,little", "max_model_len": 64}
PREFILL, DECODE = ({"role": role, "count": 1, "model": "small"} for role in ("prefill", "decode"))


def planned(tmp_path: Path, pools: list[dict[str, Any]], *others: dict[str, Any]) -> Plan:
    file = tmp_path / "up.yaml"
    content = {"coordinator": {"other_models": list(others)}, "up": {"pools": pools}}
    file.write_text(yaml.safe_dump({**content, "common": {"device": "cpu"}}))
    flags = {"run_dir": Value(tmp_path / "run", "--run-dir"), "port": Value(0, "--port")}
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
