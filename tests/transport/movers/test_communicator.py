"""The communicator of the mover nccl: torch's watchdog is off, and what takes too long is known to hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from support.played_gpu import GPU, played_gpu

from splitserve.transport.movers import communicator
from splitserve.transport.movers.communicator import Communicator

WATCHDOG = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "RETHROW_CUDA_ERRORS")


def test_torchs_watchdog_is_off_before_the_first_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its defaults it ends the whole process when a peer dies in mid-transfer."""
    found: list[tuple[list[str | None], float]] = []

    class Group:
        def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
            limits = [os.environ.get(f"TORCH_NCCL_{name}") for name in WATCHDOG]
            found.append((limits, options._timeout.total_seconds()))

        Options = SimpleNamespace

    for name in WATCHDOG:
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "3")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(Communicator, "start", lambda thread: None)
    ours = Communicator(torch.device("cuda", 0), 0, lambda key, value: None, lambda _: False, pytest.fail)
    ours.meet()
    ((limits, timeout),) = found
    assert set(limits) == {"0"}
    assert timeout > 100 * communicator.LIMIT_S


def test_a_parcel_is_received_into_memory_that_no_step_under_way_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Communicator, "start", lambda thread: None)
    with played_gpu(monkeypatch) as gpu:
        gpu.beside_steps = True
        ours = Communicator(GPU, 1, lambda key, value: None, lambda _: False, pytest.fail)
        ours._stream, ours._group = torch.cuda.Stream(GPU), MagicMock()  # type: ignore[no-untyped-call]
        assert ours.receive(8).device == GPU


def test_a_meeting_and_a_parcel_hang_once_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    late = communicator.LIMIT_S + communicator.SLACK_S + 0.1
    monkeypatch.setattr(communicator, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Communicator, "start", lambda thread: None)
    monkeypatch.setattr(communicator, "ProcessGroupGloo", MagicMock())
    ours = Communicator(torch.device("cpu"), 0, lambda key, value: None, lambda _: False, pytest.fail)
    assert not ours.hangs
    now += late
    assert ours.hangs, "no peer has come"
    ours.meet()
    assert not ours.hangs, "it waits for nobody"

    def wait(limit: timedelta) -> None:
        nonlocal now
        assert not ours.hangs
        now += late
        assert ours.hangs

    ours._group.send = lambda *_: SimpleNamespace(wait=wait)
    ours.send(torch.zeros(1))
    assert not ours.hangs
    ended = threading.Event()
    ours._group.abort = ended.set
    ours.tear_down()
    assert ended.wait(60), "a call that waits for the peer ends with it"


ALONE = """
import torch
from splitserve.transport.movers import communicator

communicator.LIMIT_S = 0.5
communicator.Communicator(torch.device("cpu"), 0, lambda *entry: None, lambda _: False, print)
"""


def test_a_process_that_ends_beside_a_meeting_is_not_aborted() -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "the peer did not say how it is reached\n"


TORN_DOWN = """
import threading, time, torch
from types import SimpleNamespace
from splitserve.transport.movers.communicator import Communicator

def abort():
    threading.main_thread().join()
    time.sleep(0.2)  # in Gloo
    print("aborted\\n", end="")

ours = Communicator(torch.device("cpu"), 0, lambda *entry: None, lambda _: False, lambda reason: None)
ours._group = SimpleNamespace(abort=abort)
ours.tear_down()
"""


def test_a_process_that_ends_waits_for_the_end_of_its_communicators() -> None:
    """Three of twelve were aborted whose last act was to close one."""
    ended = subprocess.run([sys.executable, "-c", TORN_DOWN], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == 2 * "aborted\n"  # by its owner, and by its thread
