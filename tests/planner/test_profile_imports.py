"""Profiles from measured steps and from benchmarks of servers, in each tool's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.planned_loads import LEVEL, question

from splitserve.engine.latency_profile import Profile
from splitserve.planner.errors import ProfilingError
from splitserve.planner.profile.closed_loop import FRONT_S, REQUEST_S, TOKEN_S, Run, Server, closed_loop
from splitserve.planner.profile.imported import imported
from splitserve.planner.profile_commands import profile
from splitserve.planner.search.candidates import Hardware, Kind
from splitserve.planner.search.goal import Goal, Limits
from splitserve.planner.search.goodput import Question
from splitserve.planner.search.search import search
from splitserve.planner.settings import ProfileSettings

LIKE = Profile.read(Path("llama-3.1-8b@2xh100"))
SLOWER = 1.3
PROMPTS = [(cached, new) for new in (16, 64, 256, 1024, 4096) for cached in (0, 1000, 8000)]
BATCHES = [(seqs, seqs * context) for seqs in (1, 2, 8, 32, 128) for context in (100, 1000, 4000)]


def prompt_s(cached: int, new: int) -> float:
    return SLOWER * LIKE.prefill.seconds(new, new * cached + new * (new + 1) / 2, 1, cached)


def batch_s(seqs: int, context: int) -> float:
    return SLOWER * LIKE.decode.seconds(seqs, context, seqs)


def step_rows() -> Iterable[str]:
    yield "began,seconds,chunks,num_seqs,num_context_tokens"
    yield from (f"0,{prompt_s(cached, new):.9f},{cached}+{new},0,0" for cached, new in PROMPTS)
    yield from (f"1,{batch_s(seqs, context):.9f},,{seqs},{context}" for seqs, context in BATCHES)
    yield "2,0.5,0+16,3,300"  # mixed: not of one role


def as_slow(made: Profile) -> None:
    """Its steps take ``SLOWER`` times as long as by ``LIKE``, also between the measured ones."""
    assert made.prefill.seconds(700, 700 * 350, 1) == pytest.approx(
        SLOWER * LIKE.prefill.seconds(700, 700 * 350, 1), rel=0.05
    )
    assert made.decode.seconds(20, 20_000, 20) == pytest.approx(
        SLOWER * LIKE.decode.seconds(20, 20_000, 20), rel=0.05
    )
    assert (made.memory, made.handoff, made.gpus) == (LIKE.memory, LIKE.handoff, LIKE.gpus)
    assert LIKE.name in made.source


def test_a_step_log_becomes_a_profile_and_the_drift_is_told(tmp_path: Path) -> None:
    (tmp_path / "decode-0-77.csv").write_text("\n".join(step_rows()) + "\n")
    made, words = imported(tmp_path, LIKE)
    as_slow(made)
    assert "prefill: 15 kinds of steps take 1.30 times as long as by llama-3.1-8b@2xh100" in words[0]
    assert made.decode.mean_error is not None
    assert made.decode.mean_error < 0.03
    assert any("decode steps that were not fitted to: off by" in line for line in words)


def test_a_plain_table_of_steps_needs_only_the_columns_it_fills(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("seconds,chunks\n" + "".join(f"{prompt_s(c, n)},{c}+{n}\n" for c, n in PROMPTS))
    made, words = imported(path, LIKE)
    assert made.prefill.seconds(1024, 1024 * 512, 1) == pytest.approx(prompt_s(0, 1024), rel=0.05)
    assert made.decode == LIKE.decode
    assert any("no steps of this role" in line for line in words)


def test_too_few_steps_scale_the_other_profile(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("seconds,num_seqs,num_context_tokens\n" + f"{batch_s(8, 8000)},8,8000\n")
    made, words = imported(path, LIKE)
    assert made.decode.seconds(64, 64_000, 64) == pytest.approx(batch_s(64, 64_000))
    assert any("was scaled" in line for line in words)


def test_forward_pass_metrics_of_aiconfigurator(tmp_path: Path) -> None:
    names = (
        "phase,sum_prefill_tokens,num_prefill_requests,sum_prefill_kv_tokens,num_decode_requests,"
        "sum_decode_kv_tokens,latency_ms"
    )
    rows = [f"context,{n},1,{c},0,0,{1e3 * prompt_s(c, n)}" for c, n in PROMPTS]
    rows += [f"decode,0,0,0,{s},{k},{1e3 * batch_s(s, k)}" for s, k in BATCHES]
    (tmp_path / "fpm.csv").write_text("\n".join([names, *rows]))
    as_slow(imported(tmp_path / "fpm.csv", LIKE)[0])


def runs() -> list[Run]:
    prefill, decode = LIKE.prefill.times(SLOWER), LIKE.decode.times(SLOWER)
    asked = [Run(prompt, 64, clients, 0, 0) for prompt in (512, 2000) for clients in (1, 4, 16)]
    seen = [closed_loop(prefill, decode, run) for run in asked]
    return [run._replace(ttft_s=ttft, tpot_s=tpot) for run, (ttft, tpot) in zip(asked, seen, strict=True)]


def test_a_table_of_servers_as_aiconfigurator_has_it(tmp_path: Path) -> None:
    rows = [f"{r.prompt},{r.output},{r.clients},{1e3 * r.ttft_s},{1e3 * r.tpot_s}" for r in runs()]
    (tmp_path / "table.csv").write_text("\n".join(["isl,osl,concurrency,ttft,tpot", *rows]))
    made, words = imported(tmp_path / "table.csv", LIKE)
    as_slow(made)
    assert "fitted to 6 benchmarks" in words[0]
    assert any(line.startswith("TTFT: off by") for line in words)


@pytest.mark.parametrize("clients_known", [True, False])
def test_results_of_vllm_bench_serve(tmp_path: Path, clients_known: bool) -> None:
    for i, r in enumerate(runs()):
        life_s = r.ttft_s + (r.output - 1) * r.tpot_s
        result = {"completed": 10, "total_input_tokens": 10 * r.prompt, "total_output_tokens": 10 * r.output,
                  "mean_ttft_ms": 1e3 * r.ttft_s, "mean_tpot_ms": 1e3 * r.tpot_s,
                  "request_throughput": r.clients / life_s,
                  "max_concurrency": r.clients if clients_known else None}  # fmt: skip
        (tmp_path / f"{i}.json").write_text(json.dumps(result))
    as_slow(imported(tmp_path, LIKE)[0])


def test_a_plan_chooses_whether_to_speculate_where_servers_were_measured_with_and_without(
    tmp_path: Path,
) -> None:
    """What an engine has besides (drafts, tiers of its KV cache) is in the step times of its profile."""
    kinds = []
    for name, accepted in (("without", 1.0), ("drafts", 1.6)):
        rows = [
            f"{r.prompt},{r.output},{r.clients},{1e3 * r.ttft_s},{1e3 * r.tpot_s / accepted}" for r in runs()
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["isl,osl,concurrency,ttft,tpot", *rows]))
        made, _ = imported(tmp_path / f"{name}.csv", LIKE)
        kinds.append(Kind.of(made.model_copy(update={"name": name}), 2))
    asked = Question.of(Hardware(tuple(kinds)), question(300, 40, count=20).load, LEVEL)
    found = search(asked, Goal("goodput", Limits(4), chunks=(2048,)), processes=1)
    used = {kind.name for _, kind in asked.hardware.pools(found.winner.candidate)}
    assert used == {"drafts"}


def test_results_of_genai_perf(tmp_path: Path) -> None:
    for i, r in enumerate(runs()):
        result = {"input_sequence_length": {"avg": r.prompt}, "output_sequence_length": {"avg": r.output},
                  "time_to_first_token": {"unit": "ms", "avg": 1e3 * r.ttft_s},
                  "inter_token_latency": {"unit": "ms", "avg": 1e3 * r.tpot_s},
                  "request_throughput": {"unit": "requests/sec", "avg": 1.0},
                  "input_config": {"perf_analyzer": {"stimulus": {"concurrency": r.clients}}}}  # fmt: skip
        (tmp_path / f"{i}.json").write_text(json.dumps(result))
    as_slow(imported(tmp_path, LIKE)[0])


def test_operators_of_vidur(tmp_path: Path) -> None:
    """A layer's operators and its attention, of two GPUs, with two sums; other degrees are skipped."""
    layers = LIKE.memory.num_layers
    names = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    head = ["num_tokens", "num_tensor_parallel_workers", "n_embd", *(f"time_stats.{n}.median" for n in names)]
    rows = [[n, gpus, 4096, *([0.1 * n] * 4)] for n in (1, 100, 1000) for gpus in (2, 4)]
    (tmp_path / "mlp.csv").write_text("\n".join(",".join(map(str, row)) for row in [head, *rows]))
    head = ["num_tensor_parallel_workers", "is_prefill", "batch_size", "prefill_chunk_size", "kv_cache_size",
            "time_stats.attn_prefill.median", "time_stats.attn_decode.median"]  # fmt: skip
    rows = [[2, True, 1, n, 0, 0.5, ""] for n in (1, 100, 1000)] + [[2, False, 1, 0, 50, "", 0.25]]
    (tmp_path / "attention.csv").write_text("\n".join(",".join(map(str, row)) for row in [head, *rows]))
    (tmp_path / "all_reduce.csv").write_text(
        "size,num_workers,time_stats.all_reduce.median\n8192,2,0.01\n8192000,2,0.01\n"
    )
    made, _ = imported(tmp_path, LIKE)
    assert made.prefill.residuals is not None
    assert made.prefill.residuals.num_points == 3
    assert made.decode.seconds(1, 50, 1) == pytest.approx(layers * (0.4 + 0.25 + 0.02) / 1e3)


@pytest.mark.parametrize(
    "content", ["", "a,b\n1,2\n", "seconds,num_seqs\nmany,1\n", "isl,osl,ttft,tpot\n9,9,1,1\n"]
)
def test_a_file_of_no_known_format_is_refused_with_where_the_formats_are(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)
    with pytest.raises(ProfilingError, match=r"^[^(]+; docs/planning\.md lists the formats"):
        imported(path, LIKE)


def test_the_command_prints_the_drift_and_writes_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, made = tmp_path / "steps.csv", tmp_path / "made.json"
    steps.write_text("\n".join(step_rows()))
    settings = ProfileSettings(published=steps, like=Path("llama-3.1-8b@2xh100"), output=made, name="mine")
    assert profile(settings) == 0
    assert "1.30 times as long" in capsys.readouterr().out
    assert Profile.read(made).name == "mine"


def test_like_needs_a_file_to_import() -> None:
    with pytest.raises(ValidationError, match="--like is for --published"):
        ProfileSettings(model=Path("m"), like=Path("p.json"))


# --- the load of a benchmark -----------------------------------------------------------------------------


def test_a_client_alone_waits_for_its_own_prompt_only() -> None:
    ttft, tpot = closed_loop(LIKE.prefill, LIKE.decode, Run(1000, 65, 1, 0, 0), Server(spread=0.0))
    prompt = LIKE.prefill.seconds(1000, 1000 * 1001 / 2, 1)
    assert ttft == pytest.approx(prompt + REQUEST_S + FRONT_S + 1000 * TOKEN_S)
    assert tpot == pytest.approx(LIKE.decode.seconds(1, 1000 + 32.5, 1), rel=1e-3)


def test_a_prompt_that_arrives_during_a_step_is_not_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one was planned already: here a token of the first client."""
    monkeypatch.setattr("splitserve.planner.profile.closed_loop.WAVES", 1)
    ttft, _ = closed_loop(LIKE.prefill, LIKE.decode, Run(1000, 65, 2, 0, 0), Server(spread=0.0))
    prompt, token = LIKE.prefill.seconds(1000, 1000 * 1001 / 2, 1), LIKE.decode.seconds(1, 1001, 1)
    front, once = FRONT_S + 1000 * TOKEN_S, min(LIKE.prefill.base_s, LIKE.decode.base_s)
    first, second = REQUEST_S + front + prompt, REQUEST_S + front + 2 * (prompt + token) - once
    assert prompt > front
    assert ttft == pytest.approx((first + second) / 2, rel=1e-3)


def test_every_request_is_answered_whatever_a_step_holds() -> None:
    """The first token waits for all prompts at most, the others are delayed by these at most."""
    run = Run(1000, 65, 16, 0, 0)
    found = {
        (size, mixes, cuts): closed_loop(LIKE.prefill, LIKE.decode, run, Server(size, mixes, cuts, 0.0))
        for size in (300, 1100, 8192) for mixes in (True, False) for cuts in (True, False)
    }  # fmt: skip
    prompt = LIKE.prefill.seconds(1000, 1000 * 1001 / 2, 1)
    for server, (ttft, tpot) in found.items():
        assert prompt < ttft < 17 * prompt + 16 * FRONT_S, server
        assert (
            LIKE.decode.seconds(1, 1000, 1) < tpot < LIKE.decode.seconds(16, 16 * 1065, 16) + 16 * prompt / 64
        )
    assert found[8192, False, True][1] < found[1100, True, False][1], "prompts first: fewer interruptions"


def test_clients_whose_answers_vary_do_not_wait_for_each_other() -> None:
    run = Run(1000, 400, 8, 0, 0)
    even, varied = (
        closed_loop(LIKE.prefill, LIKE.decode, run, Server(spread=spread))[0] for spread in (0.0, 0.1)
    )
    assert varied < 0.7 * even


def test_a_row_too_few_costs_each_client_its_share_of_a_life() -> None:
    """One of eight clients always waits for a row."""
    own, asked = Profile.read(Path("llama-3.1-8b@h100")), Run(1024, 256, 8, 0, 0)
    ttft, tpot = closed_loop(own.prefill, own.decode, asked, Server(spread=0.0, max_num_seqs=7))
    alone_s = own.prefill.seconds(1024, 1024 * 1025 / 2, 1) + REQUEST_S + FRONT_S + 1024 * TOKEN_S
    assert ttft == pytest.approx(alone_s + (ttft + 255 * tpot) / 8, rel=0.1)
