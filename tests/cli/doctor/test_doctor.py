"""The doctor names each fault and its remedy, and its status shows whether anything blocks."""

from __future__ import annotations

import io
import json
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.engines import engine_config
from support.models import make_checkpoint

from splitserve.cli.checks import model_problem
from splitserve.cli.doctor.doctor import main
from splitserve.cli.settings import DEMO_MODEL, DoctorSettings
from splitserve.coordinator.run_folder import Door, RunFolder, announce
from splitserve.engine import device, load_model, loaded_model
from splitserve.engine.cache import memory_claims
from splitserve.engine.errors import ModelConfigError
from splitserve.engine.load_model import expected_worker
from splitserve.engine.step.model_runner import ModelRunner


def doctor(**settings: object) -> tuple[int, str]:
    output = io.StringIO()
    free = {"port": 0, "control_address": "tcp://127.0.0.1:0", **settings}
    return main(DoctorSettings.model_validate(free), Console(file=output, width=200)), output.getvalue()


def test_this_machine_can_serve() -> None:
    status, message = doctor()
    assert "this machine can serve" in message
    assert status == 0
    assert "CURVE" in message
    assert "LlamaForCausalLM" in message
    assert "--threads auto would compute with" in message


def test_what_blocks_is_named_with_advice(tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    key.write_text("open to all")
    key.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, message = doctor(port=taken.getsockname()[1], key_file=key, model=tmp_path / "none")
    assert status == 1
    assert "HTTP port: cannot listen on" in message
    assert "chmod 600" in message
    assert "is no folder" in message
    assert "3 problems" in message


def test_the_coordinator_that_runs_already_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder()
    with socket.create_server(("127.0.0.1", 0)) as control, socket.create_server(("127.0.0.1", 0)) as http:
        port, address = http.getsockname()[1], f"tcp://127.0.0.1:{control.getsockname()[1]}"
        url = f"http://127.0.0.1:{port}"
        announce(
            folder.path, 0, Door(url=url, admin_url=url, control_address=address, admin_key_file=tmp_path)
        )
        status, message = doctor(port=port, control_address=address)
    folder.close()
    assert status == 0
    assert message.count("is used by a splitserve coordinator that runs already") == 2


def test_each_gap_in_a_model_folder_is_named(tmp_path: Path) -> None:
    def problem() -> str:
        return model_problem(tmp_path) or ""

    assert "no config.json" in problem()
    (tmp_path / "config.json").write_text("{")
    assert "no tokenizer.json; copy the complete checkpoint" in problem()
    (tmp_path / "tokenizer.model").write_text("")
    assert "no tokenizer.json; transformers writes one: AutoTokenizer" in problem()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not JSON" in problem()
    (tmp_path / "config.json").write_text("{}")
    assert "architecture none is not supported" in problem()
    (tmp_path / "config.json").write_bytes((DEMO_MODEL / "config.json").read_bytes())
    assert "neither model.safetensors nor" in problem()
    (tmp_path / "pytorch_model.bin").write_text("")
    assert "pickled weights only (pytorch_model.bin), which are never loaded" in problem()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    (tmp_path / "1.safetensors").symlink_to(DEMO_MODEL / "model.safetensors")
    assert "lacks 1 of 2 weight files of the index: 2.safetensors" in problem()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert not problem()


def test_an_unsupported_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    status, message = doctor(model=tmp_path)
    assert status == 1
    assert "MambaForCausalLM" in message


def test_the_sizing_is_that_of_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    claims = tmp_path / "claims"  # other workers of this host do not count
    monkeypatch.setattr(memory_claims, "default_folder", lambda: claims)

    def with_free(num_bytes: int) -> tuple[int, str]:
        for module in (device, loaded_model, load_model):
            monkeypatch.setattr(module, "free_host_bytes", lambda: num_bytes)
        return doctor()

    status, message = with_free(100 << 20)
    assert status == 0
    assert "takes sequences of 2,048 tokens" in message
    with_free(
        (100 << 20) - expected_worker(DEMO_MODEL).weights
    )  # they are loaded by the time that a worker looks
    runner = ModelRunner(engine_config(DEMO_MODEL, memory_shared_by=2))
    assert f"GiB, {runner.kv_cache.num_blocks:,} blocks" in message
    status, message = with_free(28 << 20)
    assert status == 0
    assert "-> the model's own 2,048 tokens need more memory" in message
    status, message = with_free(10 << 20)
    assert status == 1
    assert "of weights do not fit" in message


@pytest.mark.parametrize(
    ("gib", "count", "ranks"),
    [
        (5, 8, 1),
        (10, 8, 2),
        (14, 8, 4),
        (10, 1, None),
        (14, 3, None),
        (70, 8, None),
    ],  # at 14: no room for blocks
)
def test_a_model_that_one_gpu_does_not_hold_is_split_among_several(
    monkeypatch: pytest.MonkeyPatch, gib: int, count: int, ranks: int | None
) -> None:
    """Of 8 GiB each."""
    monkeypatch.setattr(load_model, "weight_bytes", lambda *_: gib << 30)
    monkeypatch.setattr(load_model, "select_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    status, message = doctor()
    assert status == (ranks is None)
    assert ("are free on each of 4 GPUs" in message) == (gib == 70), "which is all that it can be split among"
    assert ("do not fit" in message or "there is room for 0 KV blocks" in message) == (ranks is None)
    assert (f"on {ranks} GPUs (--tensor-parallel-size {ranks})" in message) == (ranks not in (None, 1))
    if ranks is not None:
        worker = expected_worker(DEMO_MODEL)
        left = int(0.9 * (8 << 30)) - (gib << 30) // ranks - (1 << 30)  # on each, less a small step
        assert (worker.ranks, worker.kv_cache) == (ranks, pytest.approx(min(ranks, 2) * left, rel=0.05))


def test_a_model_without_kernels_on_this_device_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    monkeypatch.setattr(load_model, "select_device", lambda _: torch.device("cuda"))
    with pytest.raises(ModelConfigError, match="kernels on CPUs only, and the device is cuda"):
        expected_worker(tmp_path)


def test_a_truncated_weight_file_is_found(tmp_path: Path) -> None:
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:100_000])
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    status, message = doctor(model=tmp_path)
    assert status == 1
    assert (
        f"{tmp_path / 'model.safetensors'} is not a readable safetensors file (it holds 94,936 "
        "bytes of tensors"
    ) in message
