"""The counts of ``tools/house.py`` may fall and not rise: house_limits.json holds what has been reached."""

from __future__ import annotations

import json

import house
import pytest

LIMITS: dict[str, int] = json.loads(house.LIMITS.read_text())


@pytest.fixture(scope="module")
def places() -> list[house.Place]:
    return list(house.findings(house.ROOT))


@pytest.fixture(scope="module")
def counts(places: list[house.Place]) -> dict[str, int]:
    return house.counts(house.ROOT, places)


@pytest.mark.parametrize("name", LIMITS)
def test_no_count_rises(name: str, counts: dict[str, int], places: list[house.Place]) -> None:
    found = [str(place) for place in places if place.count == name]
    assert counts[name] <= LIMITS[name], (
        f"{name}: {counts[name]}, at most {LIMITS[name]}. "
        f"`python tools/house.py --list '{name}' FOLDER` lists all; the last ones: {found[-5:]}"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Of a worker that left."""', "private words"),
        ('"""Send a message."""  # to whoever asks', "private words"),
        ("def tell(worker): ...", "private names"),
        ("x = 1  # " + "long " * 30, "lines over 110 characters"),
        ("x = 1\n" * 301, "files over 300 lines"),
        ("class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(21)), "classes over 20 methods"),
    ],
)
def test_each_fault_is_found(text: str, count: str) -> None:
    assert {place.count for place in house._in_file("engine/a.py", text)} == {count}


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the number of blocks in flight, or None for people who have none."""',
        "num_in_flight = 1  # not what ``whoever`` reads",
        "def send(worker): ...",
    ],
)
def test_plain_english_is_not_a_fault(text: str) -> None:
    assert list(house._in_file("engine/a.py", text)) == []
