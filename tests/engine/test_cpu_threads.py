"""A worker computes on cores that others leave, as many as its affinity and its container allow."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.engines import engine_config
from support.models import make_checkpoint

from splitserve.engine import cpu_threads, device
from splitserve.engine.cache import memory_claims
from splitserve.engine.cache.memory_claims import MemoryClaims
from splitserve.engine.cpu_threads import choose_threads, cpu_quota, usable_cores
from splitserve.engine.step.model_runner import ModelRunner

NO_LIMIT = float("inf")


@pytest.mark.parametrize(
    ("asked", "cores", "quota", "taken", "absent", "expected"),
    [
        ("auto", range(2), NO_LIMIT, (), 0, (2, (0, 1))),  # a worker by itself
        ("auto", range(2), NO_LIMIT, (), 1, (1, (0,))),  # the first of two
        ("auto", range(2), NO_LIMIT, (0,), 0, (1, (1,))),  # the second
        ("auto", range(16), NO_LIMIT, (0, 1), 1, (7, tuple(range(2, 9)))),
        ("auto", range(16), 4.5, (), 0, (4, (0, 1, 2, 3))),  # a container of four and a half
        ("auto", range(16), 4, (0, 1, 2), 0, (1, (3,))),
        ("auto", range(16), 0.5, (), 0, (1, (0,))),
        ("auto", (3, 5), NO_LIMIT, (0, 1), 0, (2, (3, 5))),  # an affinity mask
        ("auto", range(2), NO_LIMIT, (0, 1), 0, (1, (0,))),  # nothing is left
        (2, range(2), NO_LIMIT, (0,), 0, (2, (1, 0))),  # asked for
    ],
)
def test_threads_by_what_is_left(
    asked: int, cores: range, quota: float, taken: tuple[int, ...], absent: int, expected: tuple[int, object]
) -> None:
    chosen = choose_threads(asked, cores, quota, taken, absent)
    assert (chosen.count, chosen.cores) == expected


def test_a_start_takes_this_workers_part_of_the_cores_that_are_left() -> None:
    assert choose_threads(1, range(8), NO_LIMIT, (0, 1), 0).loading == 6
    assert choose_threads(1, range(8), NO_LIMIT, (0, 1), 2).loading == 2
    assert choose_threads(3, range(2), NO_LIMIT, (0, 1), 0).loading == 3


def test_threads_are_bound_if_they_wait_for_each_other_on_cores_of_their_own() -> None:
    assert choose_threads(2, range(4), NO_LIMIT, (0,), 0).bound == (1, 2)
    assert choose_threads(1, range(4), NO_LIMIT, (), 0).bound == ()  # a lone one waits for none
    assert choose_threads(2, range(2), NO_LIMIT, (), 1).bound == ()  # the other worker will need one, too
    shared = choose_threads(2, range(2), NO_LIMIT, (0,), 0)
    assert shared.bound == ()
    assert str(shared) == (
        "2 threads (asked; 1 of 2 cores are left on this host; its threads share cores with other workers)"
    )


@pytest.mark.parametrize(
    ("asked", "cores", "absent", "ranks", "of_each"),
    [
        ("auto", 8, 0, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),  # two sockets
        ("auto", 8, 1, 4, [(0,), (1,), (2,), (3,)]),  # a worker beside it gets as many
        ("auto", 7, 0, 2, [(0, 1, 2), (3, 4, 5)]),
        (3, 8, 0, 2, [(0, 1, 2), (3, 4, 5)]),
        ("auto", 2, 0, 4, [(), (), (), ()]),  # fewer cores than ranks: the scheduler places them
    ],
)
def test_each_rank_has_cores_of_its_own(
    asked: Any, cores: int, absent: int, ranks: int, of_each: list[tuple[int, ...]]
) -> None:
    threads = choose_threads(asked, range(cores), NO_LIMIT, (), absent, ranks)
    each = [threads.of_rank(number) for number in range(ranks)]
    assert [rank.bound for rank in each] == of_each
    assert {rank.count for rank in each} == {threads.count} == {len(of_each[0]) or 1}
    assert threads.bound == sum(of_each, ()), "which the worker claims"
    assert {rank.loading for rank in each} == {threads.loading}, "they load one after the other"


def test_the_log_has_the_threads_of_each_rank() -> None:
    assert str(choose_threads(2, range(4), NO_LIMIT, (), 0, 2)) == (
        "2 threads for each of 2 ranks bound to cores 0, 1, 2, 3 (asked; 4 of 4 cores are left on this host)"
    )
    assert "share cores with other workers" in str(choose_threads(2, range(3), NO_LIMIT, (), 0, 2))


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/pod/box", {"pod/box/cpu.max": "150000 100000", "pod/cpu.max": "400000 100000"}, 1.5),
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000"}, NO_LIMIT),
        ("4:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "200000", "cpu/box/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, NO_LIMIT),
        ("4:memory:/box", {}, NO_LIMIT),
    ],
)
def test_a_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, files: dict[str, str], quota: float
) -> None:
    monkeypatch.setattr(device, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(device, "CGROUP_ROOT", tmp_path)
    (tmp_path / "cgroup").write_text(f"{line}\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert cpu_quota() == quota


def test_other_workers_see_the_cores_that_one_has_claimed(tmp_path: Path) -> None:
    first = MemoryClaims("tcp://c:1", tmp_path)
    first.claim_cores((0, 3))
    first.claim(weights=5)
    second = MemoryClaims("tcp://c:1", tmp_path)
    second._pid = -1  # as if it were another process
    with second.turn() as others:
        assert others.cores == {0, 3}


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_the_threads_of_a_step_are_bound_one_to_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_claims, "default_folder", lambda: tmp_path / "claims")
    make_checkpoint(tmp_path / "model", "llama3")
    all_cores = os.sched_getaffinity(0)
    before = cpu_threads._threads()
    runner = ModelRunner(engine_config(tmp_path / "model", num_blocks=64, threads=2))
    helpers = [os.sched_getaffinity(thread) for thread in cpu_threads._threads() - before]
    mine = []

    def step() -> None:
        runner.warm_up()
        mine.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(60)
    first, second = sorted(all_cores)[:2]
    assert mine == [{first}]
    assert {second} in helpers  # of the C++ kernels
    assert os.sched_getaffinity(0) == all_cores  # the loop's thread is not bound
