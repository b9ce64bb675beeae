"""Packed weights are taken from the file of the start before, checked, bounded and replaced as a whole."""

from __future__ import annotations

import logging
import mmap
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitserve.kernels import huge_pages, packed_weights
from splitserve.kernels.packed_weights import PackedWeights, kept_files

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="maps files as Linux does")
SIZES = (3 << 20, 100, 6 << 20, 70_000)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1)
    monkeypatch.setattr(huge_pages, "MOVING_SHARE", 1.0)


def start(paths: Sequence[Path], sizes: Sequence[int] = SIZES) -> tuple[list[Tensor], int]:
    """The weights of a start, and how many it packed; returns after its background work."""
    packed, num_filled = PackedWeights(paths), 0

    def filled(seed: int, count: int) -> Tensor:
        def fill(memory: Tensor) -> None:
            nonlocal num_filled
            num_filled += 1
            memory.copy_(torch.randint(255, (count,), generator=torch.Generator().manual_seed(seed)))

        return packed.filled(count, torch.uint8, fill)

    weights = [filled(seed, count) for seed, count in enumerate(sizes)]
    if thread := packed.finish():
        thread.join(60)
        assert not thread.is_alive()
    return weights, num_filled


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_second_start_packs_nothing_and_has_the_same_weights(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "key.packed"
    first, num_first = start([path])
    second, num_second = start([path])
    assert (num_first, num_second) == (len(SIZES), 0)
    assert same(first, second)  # after they were moved to huge pages


@pytest.mark.parametrize("damage", ["a byte", "cut short", "empty", "no footer", "a wild footer"])
def test_a_damaged_file_is_made_anew_with_one_line_in_the_log(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key.packed"
    first, _ = start([path])
    content = bytearray(path.read_bytes())
    content[4 << 20] ^= 1
    wild = b'{"sizes": [1e99], "checksum": 0}'
    path.write_bytes(
        {
            "a byte": bytes(content),
            "cut short": path.read_bytes()[:-1000],
            "empty": b"",
            "no footer": bytes(9 << 20),
            "a wild footer": bytes(10) + wild + len(wild).to_bytes(8, "little"),
        }[damage]
    )
    caplog.set_level(logging.WARNING)
    second, num_filled = start([path])
    assert num_filled == len(SIZES)
    assert same(first, second)
    assert [record.message.count("packed and kept again") for record in caplog.records] == [1]
    assert start([path])[1] == 0


def test_a_file_of_other_weights_is_not_used_beyond_what_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "key.packed"
    start([path])
    changed = (*SIZES[:2], 5 << 20, 80_000)
    weights, num_filled = start([path], changed)
    assert num_filled == 2
    again, num_again = start([path], changed)
    assert num_again == 0
    assert same(weights, again)


def test_where_one_folder_cannot_be_written_the_next_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "file" / "key.packed", tmp_path / "cache" / "key.packed"]
    start(paths)
    assert paths[1].exists()
    assert start(paths)[1] == 0


def test_old_files_go_and_a_part_left_by_a_dead_process_is_replaced(tmp_path: Path) -> None:
    for number in range(5):
        path = tmp_path / f"old{number}.packed"
        path.write_text("")
        os.utime(path, (number, number))
    (tmp_path / "key.part").write_bytes(bytes(20 << 20))
    start([tmp_path / "key.packed"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.packed", "old3.packed", "old4.packed"]
    assert start([tmp_path / "key.packed"])[1] == 0


def test_the_parts_of_one_model_stay_together(tmp_path: Path) -> None:
    names = [f"{model}-{rank}-of-4.packed" for model in "abcd" for rank in range(4)]
    for name in names:
        start([tmp_path / name])
    assert sorted(path.name for path in tmp_path.iterdir()) == names[4:]


def test_nothing_is_kept_of_a_small_model_nor_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1 << 30)
    start([tmp_path / "small" / "key.packed"])
    assert not (tmp_path / "small").exists()
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1)
    full = os.statvfs_result((4096, 4096, 1000, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    caplog.set_level(logging.INFO)
    start([tmp_path / "full" / "key.packed"])
    assert not list((tmp_path / "full").iterdir())
    assert "free space" in caplog.text


def test_another_name_or_type_has_another_file(tmp_path: Path) -> None:
    pytest.importorskip("splitserve.kernels._cpu")
    names = {kept_files(tmp_path, *identity)[0].name for identity in (("a", 1), ("a", 2), ("b", 1), ("a", 1))}
    assert len(names) == 3


def test_mapped_weights_are_read_while_they_are_moved_to_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "MOVED_BYTES", huge_pages.HUGE_PAGE_BYTES)
    content = torch.randint(255, (21 << 20,), dtype=torch.uint8)
    (tmp_path / "weights").write_bytes(content.numpy().tobytes())
    with (tmp_path / "weights").open("rb") as file:
        mapped = huge_pages.map_file(file.fileno(), len(content))
    assert huge_pages.huge_page_share([mapped]) == 0
    moving = threading.Thread(target=huge_pages.move_to_huge_pages, args=[mapped])
    moving.start()
    while moving.is_alive():
        assert torch.equal(mapped, content)
    assert torch.equal(mapped, content)
    if "[never]" not in huge_pages.SETTING.read_text():
        assert huge_pages.huge_page_share([mapped]) == pytest.approx(20 / 21)


@pytest.mark.parametrize(("setting", "remedy"), [("[never]", "echo madvise"), ("[always]", "compact_memory")])
def test_small_pages_under_weights_are_warned_of_with_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    remedy: str,
) -> None:
    monkeypatch.setattr(huge_pages, "SETTING", tmp_path / "enabled")
    (tmp_path / "enabled").write_text(setting)
    memory = mmap.mmap(-1, 4 << 20)  # malloc may give memory that an earlier test had on huge pages
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    huge_pages.warn_of_small_pages([torch.frombuffer(memory, dtype=torch.uint8).fill_(1)])
    assert re.search(r"\b\d% of the weights lie on huge pages", caplog.text)
    assert remedy in caplog.text


def test_a_move_that_linux_refuses_leaves_the_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "MREMAP_FIXED", 1 << 20)  # no such flag
    first, _ = start([tmp_path / "key.packed"])
    second, num_filled = start([tmp_path / "key.packed"])
    assert num_filled == 0
    assert same(first, second)
