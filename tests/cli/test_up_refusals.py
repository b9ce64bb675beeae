"""What ``splitserve up`` refuses before anything starts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from support.planned import planned

from splitserve.cli import up
from splitserve.cli.config import ConfigError, Sources, Value
from splitserve.cli.extras import EXTRAS
from splitserve.cli.local_cluster import curl_example
from splitserve.cli.settings import ServerSettings
from splitserve.cli.up import plan


def test_what_cannot_work_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--decode is 0: start one at least, or workers of both roles by --mixed"
    ):
        planned(model, tmp_path, decode="0")
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        planned(model, tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, device: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--device {device}: torch finds no GPU on this machine"):
        planned(model, tmp_path, prefill_device=device)
    assert not (tmp_path / "run").exists()
    assert planned(model, tmp_path, prefill_device=device, runner="paced:llama-125m-cpu").workers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": "8"}, "--device auto --tensor-parallel-size 8: torch finds 4 GPUs"),
        (
            {"decode_tensor_parallel_size": "2", "decode_device": "cuda:0,cuda:3"},
            "--device cuda:3 --tensor-parallel-size 2: torch finds 4 GPUs, cuda:0 to cuda:3",
        ),
        (
            {"prefill_tensor_parallel_size": "2", "flexible": "true"},
            "have one --tensor-parallel-size for both",
        ),
    ],
)
def test_workers_of_more_gpus_than_there_are_from_their_first_on_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(up, "num_gpus", lambda _: 4)
    with pytest.raises(ConfigError, match=message):
        planned(model, tmp_path, **flags)
    assert not (tmp_path / "run").exists()


def test_gpus_of_a_pool_of_its_own_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = {"role": "decode", "count": 1, "options": {"device": "cuda:3", "tensor_parallel_size": 2}}
    file = tmp_path / "up.yaml"
    file.write_text(yaml.safe_dump({"up": {"pools": [pool]}, "common": {"device": "cpu"}}))
    flags = {"run_dir": Value(tmp_path / "run", "--run-dir"), "port": Value(0, "--port")}
    for count, refused in ((5, False), (4, True)):
        monkeypatch.setattr(up, "num_gpus", lambda devices, count=count: count * ("cuda:3" in devices))
        with pytest.raises(ConfigError, match="cuda:3") if refused else nullcontext():
            made = plan(flags, Sources.read(file, {}))
            assert [worker.device for worker in made.workers] == ["cpu", "cpu", "cuda:3"]


def test_a_run_directory_that_cannot_be_made_is_said_so(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"--run-dir: cannot make the folder .*run .Not a directory.; name another"
    ):
        planned(model, tmp_path, run_dir=str(tmp_path / "file" / "run"))


NOTHING_ELSE = Sources.read(None, {})


def test_stored_blocks_need_a_key_that_stays(model: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with pytest.raises(ConfigError, match=r"--kv-store: .* give --key-file or --run-dir"):
        plan({"model": Value(str(model), "--model"), "kv_store": Value(store, "--kv-store")}, NOTHING_ELSE)
    found = planned(model, tmp_path, kv_store=store, run_dir=str(tmp_path / "run"))
    assert {worker.kv_store for worker in found.workers} == {store}


def test_blocks_in_an_object_store_need_its_client(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = str(tmp_path / "run")
    found = planned(model, tmp_path, kv_store="s3://blocks/x", run_dir=run_dir)
    assert {worker.kv_store for worker in found.workers} == {"s3://blocks/x"}
    monkeypatch.setitem(EXTRAS, "object-store", ("obstore_that_is_not_there",))
    with pytest.raises(
        ConfigError, match=r"--kv-store: .*not installed: pip install 'splitserve\[object-store\]'"
    ):
        planned(model, tmp_path, kv_store="s3://blocks/x", run_dir=run_dir)
    assert planned(model, tmp_path, kv_store=str(tmp_path), run_dir=run_dir).workers


def test_every_worker_gets_the_folder_of_adapters(model: Path, tmp_path: Path) -> None:
    found = planned(model, tmp_path, lora_folder=str(tmp_path), max_loras="3", decode_max_lora_rank="64")
    assert {(worker.lora_folder, worker.max_loras) for worker in found.workers} == {(tmp_path, 3)}
    assert {worker.max_lora_rank for worker in found.workers} == {16, 64}
    with pytest.raises(
        ConfigError, match="--lora-folder needs --runner model: a paced worker computes nothing"
    ):
        planned(model, tmp_path, lora_folder=str(tmp_path), runner="paced:p.json")


def test_a_chat_needs_a_key_where_keys_are_asked_for(model: Path, tmp_path: Path) -> None:
    tenants, key = str(tmp_path / "tenants.sqlite"), tmp_path / "key"
    with pytest.raises(ConfigError, match="need --api-key-file"):
        planned(model, tmp_path, tenants_file=tenants, chat="true")
    with pytest.raises(ConfigError, match=r"cannot read .*key .No such file"):
        planned(model, tmp_path, tenants_file=tenants, prompt="Hi", api_key_file=str(key))
    key.write_text(" \n")
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        planned(model, tmp_path, tenants_file=tenants, prompt="Hi", api_key_file=str(key))
    key.write_text("sk-split-x\n")
    made = planned(model, tmp_path, tenants_file=tenants, prompt="Hi", api_key_file=str(key))
    assert made.up.api_key_file == key
    assert "Authorization: Bearer" in curl_example(made)
    assert "Authorization" not in curl_example(planned(model, tmp_path))


def test_one_question_and_a_chat_are_refused_together(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--chat asks for yours: give one of them"):
        planned(model, tmp_path, chat="true", prompt="Hi")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"control_address": "tcp://127.0.0.1:9000"}, "--port and --control-address both take port 9000:"),
        ({"admin_port": "9000"}, "--port and --admin-port both take port 9000:"),
        (
            {"control_address": "tcp://127.0.0.1:9002", "admin_port": "9001", "processes": "2"},
            "--control-address and --admin-port both take port 9002, counted on for --processes 2:",
        ),
    ],
)
def test_one_port_for_two_things_is_refused_at_once(
    model: Path, tmp_path: Path, given: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message} choose others$"):
        planned(model, tmp_path, port="9000", **given)
    assert not (tmp_path / "run").exists()


def test_one_port_number_on_two_addresses_is_no_clash(model: Path) -> None:
    settings = {"model": model, "insecure": True, "port": 9000, "control_address": "tcp://127.0.0.2:9000"}
    assert ServerSettings.model_validate(settings).port == 9000


def test_a_port_in_use_is_refused(model: Path, tmp_path: Path) -> None:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+ .*in use"),
    ):
        planned(model, tmp_path, port=str(taken.getsockname()[1]))
