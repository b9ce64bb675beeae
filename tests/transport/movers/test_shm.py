"""The mover by shared memory."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.kv_pools import BLOCK_BYTES, DEADLINE_S, NUM_BLOCKS, SECRET, filled_pool
from support.shm_owner import shm_pair, start_owner

from splitserve.transport.errors import MoverError, PeerEnded
from splitserve.transport.movers.shm import SharedPool, ShmSource


def test_putting_into_a_dead_process_is_an_error(stack: ExitStack) -> None:
    process, name = start_owner(stack, NUM_BLOCKS * BLOCK_BYTES)
    source = ShmSource(name, NUM_BLOCKS, filled_pool())
    stack.callback(source.close)
    source.put(1, SECRET, [(0, 3, 4)])
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    with pytest.raises(MoverError, match="has ended"):
        source.put(1, SECRET, [(0, 3, 4)])


def test_a_writer_with_nothing_to_write_lets_a_dead_process_s_memory_go(stack: ExitStack) -> None:
    """It stayed until the next prompt for that worker, and its successor found no room for its own pool."""
    process, name = start_owner(stack, NUM_BLOCKS * BLOCK_BYTES)
    source = ShmSource(name, NUM_BLOCKS, filled_pool())
    assert source.poll() == []
    process.kill()
    process.wait(DEADLINE_S)
    with pytest.raises(PeerEnded, match="has ended"):
        source.poll()
    source.close()
    inodes = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert name.rpartition(":")[2] not in inodes


def test_a_killed_owner_leaves_no_memory_behind(stack: ExitStack) -> None:
    process, name = start_owner(stack, NUM_BLOCKS * BLOCK_BYTES)
    process.kill()
    process.wait(DEADLINE_S)
    with pytest.raises(PeerEnded, match="has ended"):
        ShmSource(name, NUM_BLOCKS, filled_pool())


def test_an_owner_that_nobody_has_waited_for_has_ended_too(stack: ExitStack) -> None:
    process, name = start_owner(stack, NUM_BLOCKS * BLOCK_BYTES)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(PeerEnded, match="has ended"):
        ShmSource(name, NUM_BLOCKS, filled_pool())


def test_a_pool_cannot_be_shrunk_under_its_writers(stack: ExitStack) -> None:
    shared = SharedPool.create(1 << 20)
    stack.callback(shared.close)
    _, pid, descriptor, _ = shared.name.split(":")
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file, pytest.raises(PermissionError):
        os.ftruncate(file.fileno(), 0)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "memfd",
        "memfd:x:1:2",
        "/dev/shm/x",
        f"memfd:{os.getpid()}:0:1",
        f"memfd:{os.getpid()}:99999:1",
        "memfd:-1:0:0",
        "memfd:0:0:0",
        f"memfd:{1 << 40}:0:0",
    ],
    ids=[
        "empty",
        "memfd",
        "no-pid",
        "path",
        "no-descriptor-0",
        "no-descriptor-99999",
        "negative-pid",
        "no-process",
        "no-number-of-a-process",
    ],
)
def test_names_of_something_else_are_refused(name: str) -> None:
    with pytest.raises(MoverError, match=r"shared memory|cannot map"):
        ShmSource(name, NUM_BLOCKS, filled_pool())


def test_another_file_of_a_process_is_not_taken_for_a_pool(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(NUM_BLOCKS * BLOCK_BYTES)
        name = f"memfd:{os.getpid()}:{file.fileno()}:{os.fstat(file.fileno()).st_ino}"
        with pytest.raises(MoverError, match="cannot map"):
            ShmSource(name, NUM_BLOCKS, filled_pool())


def test_a_pool_smaller_than_it_claims_is_refused(stack: ExitStack) -> None:
    shared = SharedPool.create(NUM_BLOCKS * BLOCK_BYTES)
    stack.callback(shared.close)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MoverError, match="are needed"):
        ShmSource(shared.name, NUM_BLOCKS + 1, filled_pool())
    assert set(os.listdir("/proc/self/fd")) <= before  # garbage of another test may end meanwhile


def test_a_pool_has_its_memory_from_the_start(stack: ExitStack) -> None:
    """Else a step would end its process where there is none left."""
    shared = SharedPool.create(1 << 20)
    stack.callback(shared.close)
    assert os.fstat(shared._descriptor).st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("item", [(0, 0, NUM_BLOCKS), (0, NUM_BLOCKS, 0), (0, 0, -1), (0, -1, 0)])
def test_blocks_that_do_not_exist_are_an_error(stack: ExitStack, item: tuple[int, int, int]) -> None:
    _, source, pool = shm_pair(stack, filled_pool())
    with pytest.raises(MoverError, match="pools of"):
        source.put(1, SECRET, [item])
    assert not pool.any()


def test_more_memory_than_there_is_is_an_error_that_tells_what_to_do() -> None:
    with pytest.raises(MoverError, match="fewer KV blocks"):
        SharedPool.create(1 << 60)
