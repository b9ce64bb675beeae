"""What a plan writes for `splitserve up` starts what was planned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import yaml
from support.kubernetes import HELM, MINIMAL, manifests, pod_specs
from support.planned_loads import question
from support.simulated import profile

from splitserve.cli.config import ConfigError, Sources, Value, load
from splitserve.cli.up import plan as up
from splitserve.cli.up_workers import pools_of
from splitserve.engine.latency_profile import Numerics
from splitserve.planner.plan_command import plan as plan_command
from splitserve.planner.search.candidates import Candidate, Group, Hardware, Kind
from splitserve.planner.search.launch import write_launch
from splitserve.planner.settings import PlanSettings
from splitserve.traces.own_format import write_trace
from splitserve.traces.request import Trace
from splitserve.worker.settings import DecodeSettings, FlexibleSettings, PrefillSettings


def test_the_command_writes_a_configuration_that_up_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile().write(tmp_path / "p.json")
    requests = question(300, 3, count=24).load.requests
    write_trace(tmp_path / "t.jsonl", Trace("t", lambda: iter(requests)))
    settings = PlanSettings(
        trace=tmp_path / "t.jsonl", profile=tmp_path / "p.json", gpus=3, slo="ttft=0.4@p90,tpot=0.03@p90",
        jobs=1, chunk_budgets="512", json_file=tmp_path / "j.json", plot_file=tmp_path / "p.png",
        requests=60, launch_file=tmp_path / "up.yaml", workers_per_host=2,
    )  # fmt: skip
    assert plan_command(settings) is not None
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Recommended: ", "in other orders", "isaggregat", "colocated", "50% more load",
                 "from means", "TPOT here is", "2 workers to a host change nothing for"):  # fmt: skip
        assert part in text
    message = json.loads((tmp_path / "j.json").read_text())
    assert message["best"]["goodput_per_s"] > 0
    assert message["tpot"] == "(last token - first token) / (tokens - 1)"
    assert (tmp_path / "p.png").stat().st_size > 10_000
    best = message["best"]
    assert (tmp_path / "up.yaml").read_text().startswith(f"# splitserve plan: {message['recommended']}, for ")
    launched = up(
        {"run_dir": Value(tmp_path / "run", "test"), "port": Value(0, "test")},
        Sources.read(tmp_path / "up.yaml", env={}),
    )
    workers = [(w.worker_id.split("-")[0], w) for w in launched.workers]
    prefills, decodes = ([w for role, w in workers if role == wanted] for wanted in ("prefill", "decode"))
    assert (len(prefills), len(decodes)) == (best["prefill"], best["decode"])
    assert {w.max_batch_tokens for w in prefills} == {best["max_batch_tokens"]}  # type: ignore[attr-defined]
    generating = [w for role, w in workers if role != "prefill"]
    assert len(generating) == best["decode"] + best["colocated"] > 0
    assert {w.max_num_seqs for w in generating} == {best["max_num_seqs"]}  # type: ignore[attr-defined]
    memory = profile().memory
    assert {(w.block_size, w.num_blocks) for w in launched.workers} == {
        (memory.block_size, memory.num_blocks)
    }
    assert {s.max_model_len for s in (launched.coordinator, *launched.workers)} == {memory.max_model_len}


def test_workers_are_launched_in_the_types_that_were_measured(tmp_path: Path) -> None:
    path, candidate = tmp_path / "up.yaml", Candidate(1, 1, 0, 512, 16, prefill_kind=0, decode_kind=1)
    numerics = Numerics(dtype="bfloat16", kv_dtype="fp8", quantization="fp8", exact=False)
    whole, cut = (
        profile(numerics=numerics),
        profile(numerics=numerics.model_copy(update={"kv_dtype": "auto"})),
    )
    for decode, differ in ((whole, False), (cut, True), (profile(), False)):
        write_launch(path, Hardware((Kind("a", whole), Kind("b", decode))), candidate)
        launched = up(
            {"run_dir": Value(tmp_path / "run", "test"), "port": Value(0, "test")}, Sources.read(path, env={})
        )
        found = [(w.dtype, w.kv_dtype, w.quantization, w.exact) for w in launched.workers]
        assert found[0] == ("bfloat16", "fp8", "fp8", False)
        assert found[1] == (
            tuple(decode.numerics.model_dump().values())
            if decode.numerics
            else ("auto", "auto", "none", False)
        )
        assert ("measured in different types" in path.read_text()) == differ


def test_several_kinds_of_hardware_are_launched_each_as_its_profile_is(tmp_path: Path) -> None:
    """By one command on one machine, or by one command for each role on machines of their own."""
    memory = profile().memory.model_copy(update={"num_blocks": 300, "max_model_len": 1024})
    small = profile(memory=memory, expert_parallel=True)
    hardware = Hardware((Kind("large", profile(), gpus=2), Kind("small", small)))
    path, candidate = (
        tmp_path / "up.yaml",
        Candidate(2, 1, 0, 512, 16, prefill_kind=0, decode_kind=1, mover="tcp"),
    )
    write_launch(path, hardware, candidate, "why")
    launched = up(
        {"run_dir": Value(tmp_path / "run", "test"), "port": Value(0, "test")}, Sources.read(path, env={})
    )
    assert [
        (w.role, w.num_blocks, w.mover, w.tensor_parallel_size, w.expert_parallel) for w in launched.workers
    ] == [
        ("prefill", profile().memory.num_blocks, "tcp", 2, False),
        ("prefill", profile().memory.num_blocks, "tcp", 2, False),
        ("decode", 300, "tcp", 1, True),
    ]
    flags = {"model": Value("m", "test"), "insecure": Value(True, "test")}
    alone = [load(role, flags, Sources.read(path, env={})) for role in ("coordinator", "prefill", "decode")]
    assert {settings.max_model_len for settings in alone} == {1024}  # type: ignore[attr-defined]
    assert alone[2].num_blocks == 300  # type: ignore[attr-defined]
    message = path.read_text()
    assert "`splitserve prefill` on large (2 of them), `splitserve decode` on small (1 of them)" in message
    assert "block sizes" not in message


def test_workers_of_a_pool_that_are_of_another_kind_are_launched_as_theirs_are(tmp_path: Path) -> None:
    """By `up` here, on Slurm and on Ray, by commands of their own, and as a pool of the chart."""
    small = profile(memory=profile().memory.model_copy(update={"num_blocks": 300}))
    hardware = Hardware((Kind("large", profile(), 2, stock="h100"), Kind("small", small, stock="a100")))
    beside = (Group("decode", 2, 1, 8), Group("prefill", 1, 1, 8))
    path, candidate = tmp_path / "up.yaml", Candidate(2, 1, 0, 512, 16, 0, 0, beside=beside)
    assert hardware.words(candidate) == "2P (large) + 1P (small) : 1D (large) + 2D (small)"
    write_launch(path, hardware, candidate)
    launched = up(
        {"run_dir": Value(tmp_path / "run", "test"), "port": Value(0, "test")}, Sources.read(path, env={})
    )
    found = {
        w.worker_id: (w.num_blocks, getattr(w, "max_num_seqs", 0), w.tensor_parallel_size)
        for w in launched.workers
    }
    large, few = profile().memory.num_blocks, 300
    assert {name: found[name] for name in sorted(found)} == {
        "decode-0": (large, 16, 2), "decode-1": (few, 8, 1), "decode-2": (few, 8, 1),
        "prefill-0": (large, 64, 2), "prefill-1": (large, 64, 2), "prefill-2": (few, 64, 1),
    }  # fmt: skip
    places = {name: (pool.sbatch, pool.ray) for pool, names in pools_of(launched.up) for name in names}
    assert places["decode-0"] == ("--gpus-per-node h100:2", "accelerator_type:H100=0.001")
    assert places["decode-2"] == ("--gpus-per-node a100:1", "accelerator_type:A100=0.001")
    assert (
        "`splitserve decode --max-num-seqs 8 --num-blocks 300 --tensor-parallel-size 1` on small (2 of them)"
        in path.read_text()
    )
    write_launch(tmp_path / "values.yaml", hardware, candidate)
    pools = yaml.safe_load((tmp_path / "values.yaml").read_text())["pools"]
    where = {name: (p["role"], p["replicas"], p["nodeSelector"]["gpu"]) for name, p in pools.items()}
    assert where == {
        "prefill": ("prefill", 2, "h100"), "decode": ("decode", 1, "h100"),
        "decode-2": ("decode", 2, "a100"), "prefill-3": ("prefill", 1, "a100"),
    }  # fmt: skip
    written = yaml.safe_load(path.read_text())
    written["up"]["pools"][0]["options"]["num_bloks"] = 1
    path.write_text(yaml.safe_dump(written))
    with pytest.raises(ConfigError, match="a decode worker has no setting 'num_bloks'"):
        up({"run_dir": Value(tmp_path / "run", "test")}, Sources.read(path, env={}))


@pytest.mark.parametrize("candidate", [Candidate(0, 0, 3, 512, 16, mover="tcp"), Candidate(2, 1, 3, 512, 16)])
def test_colocated_workers_are_launched_as_mixed_ones(tmp_path: Path, candidate: Candidate) -> None:
    write_launch(tmp_path / "up.yaml", Hardware((Kind.of(profile()),)), candidate)
    launched = up(
        {"run_dir": Value(tmp_path / "run", "test"), "port": Value(0, "test")},
        Sources.read(tmp_path / "up.yaml", env={}),
    )
    assert Counter(w.worker_id.split("-")[0] for w in launched.workers) == Counter(
        prefill=candidate.prefill, decode=candidate.decode, mixed=3
    )
    mixed = [w for w in launched.workers if isinstance(w, FlexibleSettings)]
    assert {(w.start_as, w.max_batch_tokens, w.max_num_seqs) for w in mixed} == {("mixed", 512, 16)}
    assert {w.mover for w in mixed} == {candidate.mover or "auto"}


def test_the_chart_takes_a_plan_as_its_values(tmp_path: Path) -> None:
    """Pools that the plan lacks are taken out of the chart's own values, each option is its command's."""
    chart = Path(__file__).parents[2] / "deploy/kubernetes/chart"
    schema = json.loads((chart / "values.schema.json").read_text())
    hardware, path = Hardware((Kind("h100", profile(), gpus=2),)), tmp_path / "plan-values.yaml"
    for candidate in (Candidate(2, 1, 0, 512, 16, mover="tcp"), Candidate(0, 0, 3, 512, 16)):
        write_launch(path, hardware, candidate, "why")
        written, own = yaml.safe_load(path.read_text()), yaml.safe_load((chart / "values.yaml").read_text())
        pools = {name: pool for name, pool in (own["pools"] | written["pools"]).items() if pool}
        jsonschema.validate({**own, "model": {"name": "m"}, "pools": pools}, schema)
        assert {pool["role"]: pool["replicas"] for pool in pools.values()} == (
            {"prefill": 2, "decode": 1} if candidate.prefill else {"worker": 3}
        )
        for name, pool in pools.items():
            settings = {"prefill": PrefillSettings, "decode": DecodeSettings}.get(name, FlexibleSettings)
            assert set(pool["options"]) <= settings.model_fields.keys()
            assert (pool["gpus"], pool["options"]["tensor_parallel_size"]) == (2, 2)
        assert written["coordinator"]["options"] == {"max_model_len": profile().memory.max_model_len}


@pytest.mark.skipif(not HELM, reason="helm is not installed")
def test_the_chart_gives_a_worker_the_gpus_that_it_is_split_among(tmp_path: Path) -> None:
    hardware, path = Hardware((Kind("a", profile(), gpus=4), Kind("b", profile()))), tmp_path / "values.yaml"
    write_launch(path, hardware, Candidate(2, 1, 0, 512, 16, prefill_kind=0, decode_kind=1))
    values = {**MINIMAL, **yaml.safe_load(path.read_text())}
    values["coordinator"] |= MINIMAL["coordinator"]
    del values["pools"]["prefill"]["options"]["tensor_parallel_size"]
    values["workerOptions"] = {"tensor_parallel_size": 8, "threads": 2}
    specs = pod_specs(manifests(values, tmp_path))
    for name, gpus in (("demo-prefill", 4), ("demo-decode", 1)):
        (worker,) = specs[name]["containers"]
        assert worker["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": gpus}
        split = [arg for arg in worker["args"] if arg.startswith("--tensor-parallel-size")]
        assert split == [f"--tensor-parallel-size={gpus}"], "a pool's own, whatever all workers have"
