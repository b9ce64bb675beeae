"""The folder of adapters: what is in it is served, soon after it has come, and nothing in it hurts the
worker."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from splitserve.engine.adapters import files
from splitserve.engine.adapters.files import CONFIG, WEIGHTS, AdapterFile, read_adapter
from splitserve.engine.errors import AdapterError, WeightsError
from splitserve.worker.adapters import AdapterFolder, require_folder

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


class Resident:
    """Two slots, for ranks up to 4."""

    num_slots = 2

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        self.fails: Exception | None = None
        self.num_checked = 0

    def check(self, file: AdapterFile) -> None:
        self.num_checked += 1
        if file.rank > 4:
            raise AdapterError(f"rank {file.rank}; raise --max-lora-rank")

    def put(self, slot: int, file: AdapterFile) -> None:
        if self.fails is not None:
            raise self.fails
        self.slots[slot] = file.content


class Rig:
    """A folder that is looked at when the test wants it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.resident = folder, Resident()
        folder.mkdir()
        self.watched: AdapterFolder | None = None

    def add(self, name: str, seed: int = 0, rank: int = 2) -> str:
        """An adapter's folder; returns its content."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, 8), (8, rank)))
        save_file({f"{LAYER}.lora_A.weight": a, f"{LAYER}.lora_B.weight": b}, path / WEIGHTS)
        (path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
        return read_adapter(path).content

    def start(self) -> AdapterFolder:
        self.watched = AdapterFolder(self.folder, self.resident, period_s=3600)
        return self.watched

    def look(self, count: int = 2) -> None:
        """By default as often as a change takes."""
        assert self.watched is not None
        for _ in range(count):
            self.watched._look()

    @property
    def served(self) -> dict[str, str]:
        assert self.watched is not None
        return {adapter.name: adapter.content for adapter in self.watched.slots.reported}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "adapters")
    yield made
    if made.watched is not None:
        made.watched.stop()


def test_all_that_are_there_are_ready_at_the_start(rig: Rig) -> None:
    contents = {"a": rig.add("a", 1), "b": rig.add("b", 2)}
    rig.start()
    assert rig.served == contents
    assert set(rig.resident.slots.values()) == set(contents.values())


def test_one_comes_one_changes_one_goes(rig: Rig) -> None:
    slots = rig.start().slots
    assert rig.served == {}
    first = rig.add("a", 1)
    rig.look()
    assert rig.served == {"a": first}
    second = rig.add("a", 2)
    rig.look()
    assert rig.served == {"": first, "a": second}, "requests that run go on with the earlier content"
    assert slots.has(first)
    shutil.rmtree(rig.folder / "a")
    rig.look()
    assert [adapter.name for adapter in slots.reported] == ["", ""]


def test_it_comes_by_itself(rig: Rig) -> None:
    """The thread looks without being asked."""
    rig.watched = AdapterFolder(rig.folder, rig.resident, period_s=0.01)
    content = rig.add("a")
    until(lambda: rig.served == {"a": content})


def test_what_still_changes_is_not_read(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Neither half a folder, nor a file that is being copied. Nothing is logged meanwhile."""
    rig.start()
    content = rig.add("a")
    weights = (rig.folder / "a" / WEIGHTS).read_bytes()
    for size in range(0, len(weights), 50):
        (rig.folder / "a" / WEIGHTS).write_bytes(weights[:size])
        rig.look(1)
    (rig.folder / "a" / WEIGHTS).write_bytes(weights)
    rig.look(1)
    assert rig.served == {}
    assert not caplog.records
    rig.look(1)
    assert rig.served == {"a": content}


def test_one_that_cannot_be_served_is_logged_once_and_the_others_are(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    content = rig.add("good", 1)
    rig.add("high", 2, rank=8)
    (rig.folder / "none").mkdir()
    (rig.folder / ".hidden").mkdir()
    (rig.folder / "a\nb").mkdir()
    rig.start()
    rig.look(4)
    assert rig.served == {"good": content}
    logged = sorted(record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert len(logged) == 3
    assert logged[0].startswith("no adapter can have the name 'a\\nb'")
    assert logged[1] == f"the adapter {rig.folder / 'high'} is not served: rank 8; raise --max-lora-rank"
    assert logged[2] == (
        f"the adapter {rig.folder / 'none'} is not served: it has no adapter_config.json; copy the whole "
        "folder that peft saved"
    )
    assert rig.add("high", 2, rank=3)
    rig.look()
    assert rig.served.keys() == {"good", "high"}, "it is read again when it has changed"


def test_one_that_was_served_and_is_broken_now_is_not_served(rig: Rig) -> None:
    content = rig.add("a")
    rig.start()
    (rig.folder / "a" / CONFIG).write_text("{}")
    rig.look()
    assert rig.served == {"": content}


def test_too_many_are_named(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for seed, name in enumerate("dcba"):
        rig.add(name, seed)
    rig.start()
    assert sorted(rig.served) == ["a", "b"]
    assert caplog.messages[-1] == "--max-loras leaves 2 adapters out: c, d; raise it"
    assert rig.resident.num_checked == 2, "the others need not be read"
    shutil.rmtree(rig.folder / "a")
    rig.look(3)
    assert caplog.messages[-1] == "--max-loras leaves 1 adapters out: d; raise it"
    assert rig.watched is not None
    rig.watched.slots.give_up(set(), set())
    rig.watched.slots.give_up(set(), set())
    rig.look(1)
    assert sorted(rig.served) == ["b", "c"]


def test_one_that_cannot_be_served_is_not_called_left_out_and_is_read_again_once_mended(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "c"):
        rig.add(name, seed=ord(name))
    rig.add("b", rank=8)
    rig.start()
    rig.look()
    assert not [message for message in caplog.messages if "--max-loras" in message]
    rig.add("b", rank=2)
    rig.look()
    assert caplog.messages[-1] == "--max-loras leaves 1 adapters out: b; raise it"


def test_a_slot_is_given_up_when_nothing_uses_or_reports_its_adapter(rig: Rig) -> None:
    first, second = rig.add("a", 1), rig.add("b", 2)
    slots = rig.start().slots
    shutil.rmtree(rig.folder / "a")
    third = rig.add("c", 3)
    rig.look()
    assert slots.lacks_slots
    slots.give_up({first}, {first, second})
    assert "" in rig.served, "a request uses it"
    slots.give_up(set(), {first, second})
    assert rig.served == {"b": second}
    assert slots.has(first), "a request may be on its way"
    slots.give_up(set(), {second})
    assert not slots.has(first)
    rig.look()
    assert rig.served == {"b": second, "c": third}


def test_a_folder_that_is_away_for_a_while_takes_nothing_away(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    content = rig.add("a")
    rig.start()
    rig.folder.rename(rig.folder.with_name("elsewhere"))
    rig.look(3)
    assert rig.served == {"a": content}
    assert len([m for m in caplog.messages if "its adapters stay as they are" in m]) == 1


def test_lack_of_memory_ends_no_worker(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.resident.fails = RuntimeError("CUDA out of memory")
    content = rig.add("a")
    rig.start()
    assert rig.served == {}
    assert "no memory for the adapter a" in caplog.text
    rig.resident.fails = None
    rig.look()
    assert rig.served == {"a": content}


def test_a_link_to_itself_hides_no_other(rig: Rig) -> None:
    content = rig.add("a")
    (rig.folder / "b").symlink_to("b")
    rig.start()
    assert rig.served == {"a": content}


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("_layer", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        ("_layer", MemoryError()),
        ("header_of", WeightsError("Permission denied")),
    ],
)
def test_what_cannot_be_read_now_is_read_again(
    what: str, error: Exception, rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lack of memory ends no worker; rights that were missing change no time of the file."""
    content = rig.add("a")
    with monkeypatch.context() as patched:

        def fails(*_: object) -> None:
            raise error from (OSError(13, "Permission denied") if what == "header_of" else None)

        patched.setattr(files, what, fails)
        rig.start()
        assert (str(error) or "out of memory") in caplog.text
    rig.look()
    assert rig.served == {"a": content}


def test_there_must_be_a_folder_of_folders(rig: Rig) -> None:
    rig.add("a")
    for wrong, why in (("a", "it is an adapter itself"), ("b", "there is no such folder")):
        with pytest.raises(AdapterError, match=f"^--lora-folder {rig.folder / wrong}: {why}"):
            require_folder(rig.folder / wrong)
    require_folder(rig.folder)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
