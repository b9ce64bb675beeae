"""What ``up`` will start is fixed and checked before the first process starts."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.certificates import write_certificate
from support.planned import planned

from splitserve.cli import model_source, up
from splitserve.cli.cluster_state import known_workers
from splitserve.cli.config import ConfigError, Sources, load
from splitserve.cli.local_cluster import commands, prefixed_log
from splitserve.cli.main import cli
from splitserve.cli.settings import ServerSettings
from splitserve.transport.process.private_files import write_private
from splitserve.worker.settings import DecodeSettings, FlexibleSettings


def test_all_processes_share_model_key_and_address(model: Path, tmp_path: Path) -> None:
    made = planned(model, tmp_path, prefill="2", decode="3", max_model_len="64")
    assert [worker.name for worker in made.workers] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
    ]
    assert {worker.coordinator for worker in made.workers} == {made.coordinator.control_address}
    assert (
        {worker.key_file for worker in made.workers}
        == {made.coordinator.key_file}
        == {made.run_dir / "cluster.key"}
    )
    assert {worker.max_model_len for worker in made.workers} == {64}
    assert made.coordinator.model_name == "tiny"
    assert made.coordinator.port > 0
    assert (made.run_dir / "cluster.key").stat().st_mode & 0o777 == 0o600


def test_an_option_of_one_role_beats_that_of_all_workers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "num_gpus", lambda _: 2)
    env = {"SPLITSERVE_PREFILL_MAX_NUM_SEQS": "7", "SPLITSERVE_THREADS": "3"}
    made = planned(
        model, tmp_path, env, device="cpu", decode_device="cuda:1", num_blocks="50", decode_num_blocks="60"
    )
    prefill, decode = made.workers
    assert (prefill.device, decode.device) == ("cpu", "cuda:1")
    assert (prefill.num_blocks, decode.num_blocks) == (50, 60)
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (7, 64)
    assert (prefill.threads, decode.threads) == (3, 3)
    made = planned(model, tmp_path, env, device="cpu", decode_threads="auto")
    assert [worker.threads for worker in made.workers] == [3, "auto"]


def test_scaling_down_leaves_alone_what_would_be_started_again(model: Path, tmp_path: Path) -> None:
    steering = {"steer": "act", "steer_slo": "ttft=1,tpot=0.1", "steer_profile": "x"}
    made = planned(model, tmp_path, decode="2", steer_keep="base-*", **steering)
    assert made.coordinator.steering is not None
    assert made.coordinator.steering.keep == ("base-*", "prefill-0", "decode-0", "decode-1")
    flexible = planned(model, tmp_path, flexible="true", **steering)
    assert flexible.coordinator.steer_keep == "worker-0,worker-1"


def test_without_a_key_only_if_told_so(model: Path, tmp_path: Path) -> None:
    made = planned(model, tmp_path, insecure="true")
    assert made.coordinator.key_file is None
    assert all(worker.insecure for worker in made.workers)


def test_workers_of_this_host_reach_an_open_control_address(model: Path, tmp_path: Path) -> None:
    made = planned(model, tmp_path, control_address="tcp://0.0.0.0:7799")
    assert made.workers[0].coordinator == "tcp://127.0.0.1:7799"


def test_each_process_reads_exactly_the_planned_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_PORT", "1")
    made = planned(model, tmp_path, decode_drain_timeout_s="4", threads="2")
    processes = commands(made)
    assert [process.name for process in processes] == ["coordinator", "prefill-0", "decode-0"]
    assert (
        ServerSettings(**yaml.safe_load((made.run_dir / "coordinator.yaml").read_text())["coordinator"])
        == made.coordinator
    )
    assert (
        DecodeSettings(**yaml.safe_load((made.run_dir / "decode-0.yaml").read_text())["decode"])
        == made.workers[1]
    )
    assert all("SPLITSERVE_PORT" not in process.env for process in processes)
    assert [process.env["OMP_NUM_THREADS"] for process in processes] == ["1", "2", "2"]


def test_passwords_in_urls_stay_out_of_the_run_folder(model: Path, tmp_path: Path) -> None:
    secret = "http://user:TOPSECRET@hooks.example/x"
    umask = os.umask(0)
    try:
        made = planned(
            model,
            tmp_path,
            steer_webhook=secret,
            tenants_file=str(tmp_path / "tenants.db"),
            redis_url="redis://:TOPSECRET@redis:6379/0",
            run_dir=str(tmp_path / "run"),
        )
        coordinator, *workers = commands(made)
    finally:
        os.umask(umask)
    files = [*made.run_dir.iterdir(), made.run_dir]
    assert [file for file in files if file.stat().st_mode & 0o077] == []
    assert not any("TOPSECRET" in file.read_text() for file in files if file.is_file())
    assert not any("TOPSECRET" in text for worker in workers for text in worker.env.values())
    read = load("coordinator", {}, Sources.read(made.run_dir / "coordinator.yaml", coordinator.env))
    assert read == made.coordinator


def test_workers_of_both_roles_alone_or_beside_others(model: Path, tmp_path: Path) -> None:
    alone = planned(
        model, tmp_path, prefill="0", decode="0", mixed="2", prefill_max_batch_tokens="64", max_num_seqs="8"
    )
    assert [(w.name, w.role) for w in alone.workers] == [("mixed-0", "worker"), ("mixed-1", "worker")]
    assert [
        (w.start_as, w.max_batch_tokens, w.max_num_seqs)
        for w in alone.workers
        if isinstance(w, FlexibleSettings)
    ] == [("mixed", 64, 8), ("mixed", 64, 8)]
    beside = planned(model, tmp_path, prefill="1", decode="0", mixed="1")
    assert [w.name for w in beside.workers] == ["prefill-0", "mixed-0"]


def test_workers_that_borrow_keep_their_names_and_prefer_a_role(model: Path, tmp_path: Path) -> None:
    made = planned(
        model, tmp_path, prefill="1", decode="1", mixed="1", borrow="on", prefill_max_batch_tokens="64"
    )
    assert [
        (w.name, w.start_as, w.home, w.begins_as, w.max_batch_tokens)
        for w in made.workers
        if isinstance(w, FlexibleSettings)
    ] == [
        ("prefill-0", "prefill", "prefill", ("decode", "prefill"), 64),
        ("decode-0", "decode", "decode", ("decode", "prefill"), 64),
        ("mixed-0", "mixed", "", ("decode", "prefill"), 64),
    ]
    with pytest.raises(ConfigError, match="--borrow and --flexible"):
        planned(model, tmp_path, borrow="on", flexible="on")


async def test_a_key_or_certificate_that_is_just_being_replaced_ends_no_watch(
    model: Path, tmp_path: Path
) -> None:
    """What raises there would end the search for workers that hang, and each rolling restart, unseen."""
    certificate, key = write_certificate(tmp_path, "localhost")
    plan = planned(model, tmp_path, tls_cert=str(certificate), tls_key=str(key))
    for file in (certificate, plan.run_dir / "admin.key"):
        before = file.read_text()
        for broken in ("", "rubbish"):
            file.write_text(broken)
            assert await known_workers(plan) is None
        file.unlink()
        assert await known_workers(plan) is None
        write_private(file, before)


def test_logs_have_their_process_before_each_line() -> None:
    stream = io.StringIO()
    log = prefixed_log(stream, ["coordinator", "decode-0"])
    log("decode-0", "ready")
    assert stream.getvalue() == "decode-0    | ready\n"


def test_options_of_one_role_exist_for_every_worker_setting() -> None:
    names = {name for parameter in cli.commands["up"].params for name in parameter.opts}
    assert {
        "--device",
        "--prefill-device",
        "--decode-device",
        "--decode-max-num-seqs",
        "--prefill-max-batch-tokens",
        "--routing",
    } <= names
    assert not {"--name", "--coordinator", "--listen"} & names
    assert "--decode-device" not in CliRunner().invoke(cli, ["up", "--help"]).output.split("Workers:")[1]


def test_a_model_of_the_hub_is_resolved_once_for_all(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, bool]] = []

    def resolved(name: str, revision: str = "", *, weights: bool = True) -> Path:
        asked.append((name, revision, weights))
        return model

    monkeypatch.setattr(model_source, "resolved", resolved)
    made = planned(Path("ours/big"), tmp_path, {"SPLITSERVE_REVISION": "v1"}, decode="2")
    assert asked == [("ours/big", "v1", True)]
    assert made.coordinator.model_name == "ours/big"
    assert {(settings.model, settings.revision) for settings in (made.coordinator, *made.workers)} == {
        (model, "")
    }
