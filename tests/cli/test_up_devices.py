"""``up`` deals GPUs and memory out to its workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.planned import planned

from splitserve.cli import up, up_workers
from splitserve.cli.config import ConfigError
from splitserve.cli.up_workers import deal, shared
from splitserve.worker.settings import DecodeSettings


@pytest.mark.parametrize(
    ("flags", "count", "dealt"),
    [
        ({}, 8, ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]),
        ({}, 2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
        ({}, 1, ["cuda:0"] * 5),
        ({}, 0, ["auto"] * 5),
        ({"device": "cpu"}, 2, ["cpu"] * 5),
        ({"decode_device": "cuda:0"}, 4, ["cuda:1", "cuda:2", "cuda:0", "cuda:0", "cuda:0"]),
        ({"prefill_device": "cuda:1,cuda:3"}, 4, ["cuda:1", "cuda:3", "cuda:0", "cuda:2", "cuda:0"]),
        ({"device": "cuda:2,cuda:3"}, 4, ["cuda:2", "cuda:3", "cuda:2", "cuda:3", "cuda:2"]),
        (
            {"device": "cuda:1,cuda:0", "flexible": "true"},
            2,
            ["cuda:1", "cuda:0", "cuda:1", "cuda:0", "cuda:1"],
        ),
        ({"runner": "paced:llama-125m-cpu"}, 4, ["auto"] * 5),
    ],
)
def test_workers_are_dealt_out_over_the_gpus(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, str],
    count: int,
    dealt: list[str],
) -> None:
    """Two prefill and three decode workers."""
    monkeypatch.setattr(up, "num_gpus", lambda _: count)
    made = planned(model, tmp_path, prefill="2", decode="3", **flags)
    assert [worker.device for worker in made.workers] == dealt


def test_several_devices_in_a_file_are_dealt_out_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "num_gpus", lambda _: 2)
    made = planned(model, tmp_path, {"SPLITSERVE_DECODE_DEVICE": "cuda:1,cuda:0"}, decode="2")
    assert [worker.device for worker in made.workers] == ["cuda:0", "cuda:1", "cuda:1"]
    with pytest.raises(ConfigError, match="--device: 'gpu1' cannot be used: it has the wrong form"):
        planned(model, tmp_path, device="cuda:0,gpu1")
    with pytest.raises(ConfigError, match=r"^--device cuda:2: torch finds 2 GPUs, cuda:0 to cuda:1"):
        planned(model, tmp_path, prefill_device="cuda:0,cuda:2")


def on(name: str, device: str, ranks: int = 1) -> DecodeSettings:
    settings = {"model": "m", "insecure": True, "tensor_parallel_size": ranks}
    return DecodeSettings.model_validate({"name": name, "device": device, **settings})


def test_which_workers_share_gpus_is_named() -> None:
    apart = [on("prefill-0", "cuda:0", 2), on("decode-0", "cuda:2"), on("decode-1", "cpu", 2)]
    assert not shared([*apart, on("decode-2", "cpu", 2)])
    message = shared([*apart, on("decode-2", "cuda:0", 2), on("decode-3", "cuda:0", 2)])
    assert message.startswith("prefill-0, decode-2 and decode-3 share cuda:0 and cuda:1: ")
    message = shared([*apart, on("decode-2", "cuda:1", 2)])
    assert message.startswith("prefill-0 and decode-2 share cuda:1; decode-0 and decode-2 share cuda:2: ")


@pytest.mark.parametrize(
    ("flags", "count", "dealt", "parts"),
    [
        ({}, 8, ["cuda:0", "cuda:4", "cuda:6"], [1, 1, 1]),
        ({}, 6, ["cuda:0", "cuda:4", "cuda:0"], [2, 1, 2]),
        ({}, 4, ["cuda:0", "cuda:0", "cuda:2"], [2, 2, 2]),
        ({"decode_tensor_parallel_size": "1"}, 5, ["cuda:0", "cuda:4", "cuda:0"], [2, 1, 2]),
        ({"prefill_tensor_parallel_size": "1", "prefill": "3"}, 8,
         ["cuda:4", "cuda:5", "cuda:6", "cuda:0", "cuda:2"], [1] * 5),
        ({"decode_device": "cuda:3,cuda:1"}, 12, ["cuda:8", "cuda:3", "cuda:1"], [1, 1, 1]),
        ({"decode_tensor_parallel_size": "3"}, 7, ["cuda:0", "cuda:4", "cuda:0"], [2, 1, 2]),
        ({"prefill_device": "cuda:2"}, 8, ["cuda:2", "cuda:0", "cuda:6"], [1, 1, 1]),
        ({"prefill_device": "cpu"}, 4, ["cpu", "cuda:0", "cuda:2"], [1, 1, 1]),
        ({"device": "cpu"}, 0, ["cpu"] * 3, [1, 1, 1]),
        ({}, 0, ["auto"] * 3, [1, 1, 1]),
    ],
)  # fmt: skip
def test_each_worker_gets_neighbouring_gpus_of_its_own(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, str],
    count: int,
    dealt: list[str],
    parts: list[int],
) -> None:
    """A prefill worker on four GPUs, two decode workers on two each. ``parts``: workers that its fullest GPU
    is divided among."""
    monkeypatch.setattr(up, "num_gpus", lambda _: count)
    sizes = {"prefill_tensor_parallel_size": "4", "tensor_parallel_size": "2"}
    made = planned(model, tmp_path, decode="2", **{**sizes, **flags})
    assert [worker.device for worker in made.workers] == dealt
    assert [round(0.9 / worker.gpu_memory_utilization) for worker in made.workers] == parts


@pytest.mark.parametrize(
    ("answer", "devices", "found"), [("4", ["auto"], 0), ("4", ["cpu", "cpu"], 0), ("4", ["auto", "cuda"], 4)]
)
def test_torch_is_asked_for_gpus_only_where_there_may_be_some(
    monkeypatch: pytest.MonkeyPatch, answer: str, devices: list[str], found: int
) -> None:
    reported = subprocess.CompletedProcess([], 0, stdout=f"{answer}\n")
    monkeypatch.setattr(up_workers, "DRIVER_FILES", ("/nowhere/nvidiactl",))
    monkeypatch.setattr(up_workers.subprocess, "run", lambda *_, **__: reported)
    assert up_workers.num_gpus(devices) == found


def test_workers_share_this_hosts_memory_in_equal_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {worker.memory_shared_by for worker in planned(model, tmp_path, decode="3").workers} == {4}
    monkeypatch.setattr(up, "num_gpus", lambda _: 2)
    shares = [
        worker.gpu_memory_utilization
        for worker in planned(model, tmp_path, device="cuda", decode="2").workers
    ]
    assert sorted(shares) == [0.45, 0.45, 0.9]
    monkeypatch.setattr(up, "num_gpus", lambda _: 1)
    for device in ("cuda:0", "cuda", "auto"):
        workers = planned(model, tmp_path, device=device).workers
        assert {(worker.device, worker.gpu_memory_utilization) for worker in workers} == {("cuda:0", 0.45)}


def test_a_worker_avoids_the_gpu_that_most_are_on() -> None:
    """Its part of each GPU is that of the fullest."""
    named = [on("a", "cuda:1"), on("b", "cuda:1"), on("c", "cuda:2", 2)]
    dealt = deal([*([one] for one in named), [on("d", "cuda", 2)]], gpus=4)
    assert [worker.device for worker in dealt] == ["cuda:1", "cuda:1", "cuda:2", "cuda:2"]
    dealt = deal([[on("a", "cuda:0", 2)], [on("b", "cuda", 2)]], gpus=3)
    assert [worker.device for worker in dealt] == ["cuda:0", "cuda:1"], "one GPU is shared, not two"
