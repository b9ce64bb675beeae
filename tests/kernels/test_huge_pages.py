"""Pages of the KV cache are there before the first requests need them, and are found without holding anybody
up."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitserve.kernels import huge_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for pages")
PAGE = huge_pages.HUGE_PAGE_BYTES


def resident(memory: Tensor) -> list[bool]:
    """Return whether each huge page's first small page is in memory."""
    found = (ctypes.c_ubyte * (memory.nbytes // 4096))()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), found)
        == 0
    )
    return [bool(found[i]) for i in range(0, len(found), PAGE // 4096)]


def populate(memory: Tensor) -> list[threading.Thread]:
    """Returns the threads that go on with it. (Another test's may still be at work.)"""
    before = threading.enumerate()
    huge_pages.populate(memory)
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "populate-kv-cache" and thread not in before
    ]


def test_the_first_pages_are_there_at_once_the_rest_soon_and_the_content_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huge_pages, "FIRST_BYTES", 2 * PAGE)
    monkeypatch.setattr(huge_pages, "BACKGROUND_SHARE", 1.0)
    memory = huge_pages.huge_page_bytes(6 * PAGE)
    memory[5 * PAGE] = 7
    assert resident(memory) == [False] * 5 + [True]
    release, find, asked = threading.Event(), huge_pages._found, []

    def found(page: int, end: int) -> bool:
        if threading.current_thread() is not threading.main_thread():
            assert release.wait(60)
        asked.append(page)
        return find(page, end)

    monkeypatch.setattr(huge_pages, "_found", found)
    (thread,) = populate(memory)
    assert resident(memory) == [True, True, False, False, False, True]
    release.set()
    thread.join(60)
    assert all(resident(memory))
    assert asked == [memory.data_ptr() + i * PAGE for i in range(6)], "one huge page at a time"
    assert int(memory.sum()) == 7


def test_memory_that_is_no_longer_used_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "FIRST_BYTES", 0)
    monkeypatch.setattr(huge_pages, "BACKGROUND_SHARE", 1.0)
    at_a_page, release, find, asked = threading.Event(), threading.Event(), huge_pages._found, []

    def found(page: int, end: int) -> bool:
        asked.append(page)
        at_a_page.set()
        assert release.wait(60)
        return find(page, end)

    monkeypatch.setattr(huge_pages, "_found", found)
    memory = huge_pages.huge_page_bytes(4 * PAGE)
    (thread,) = populate(memory)
    assert at_a_page.wait(60)
    del memory
    gc.collect()
    release.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(asked) == 1, "the one that it was at"


def test_what_another_system_does_not_know_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "MADV_POPULATE_WRITE", 12345)
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert populate(memory) == []


def mapped_kib(memory: Tensor) -> int:
    """Return how much of a mapping counts as this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    start = f"{memory.data_ptr():x}-"
    next(line for line in lines if line.lstrip("0").startswith(start))
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def test_a_mapped_file_takes_no_memory_once_it_is_dropped(tmp_path: Path) -> None:
    content = torch.arange(1 << 20, dtype=torch.int32)
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    with (tmp_path / "file").open("rb") as file:
        mapped = huge_pages.map_file(file.fileno(), content.nbytes)
    assert torch.equal(mapped.view(torch.int32), content)
    assert mapped_kib(mapped) > 0
    huge_pages.drop_pages(mapped)
    assert mapped_kib(mapped) == 0
    assert torch.equal(mapped.view(torch.int32), content)
