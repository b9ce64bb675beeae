"""The cluster key file is private, whole, and says what to do when it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from splitserve.transport.errors import KeyFileError
from splitserve.transport.keys import generate_key, load_key


def test_a_key_is_written_private_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "cluster.key"
    key = generate_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path) == key
    assert key.secret.decode() not in repr(key)


def test_a_key_file_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    generate_key(path)
    for mode in (0o640, 0o604, 0o660):
        os.chmod(path, mode)
        with pytest.raises(KeyFileError, match=f"chmod 600 {path}"):
            load_key(path)


def test_an_existing_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    key = generate_key(path)
    with pytest.raises(KeyFileError, match="exists already"):
        generate_key(path)
    assert load_key(path) == key


def test_a_missing_key_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="splitserve keygen"):
        load_key(tmp_path / "none.key")


@pytest.mark.parametrize("damage", ["secret ", "public ", "splitserve-cluster-key 1\n", "everything"])
def test_a_damaged_key_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "cluster.key"
    generate_key(path)
    path.write_text("" if damage == "everything" else path.read_text().replace(damage, "", 1))
    with pytest.raises(KeyFileError, match=r"cluster key"):
        load_key(path)


def test_halves_of_two_keys_do_not_make_one(tmp_path: Path) -> None:
    generate_key(tmp_path / "a"), generate_key(tmp_path / "b")
    first, second = ((tmp_path / name).read_text().splitlines() for name in "ab")
    (tmp_path / "a").write_text("\n".join([first[0], first[1], second[2]]))
    with pytest.raises(KeyFileError, match="do not belong together"):
        load_key(tmp_path / "a")
