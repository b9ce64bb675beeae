"""The cluster key file is private, whole, and errors name the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.small_disk import small_disk

from splitserve.transport.channels.keys import ClusterKey, KeyFile, generate_key, load_key, rotate
from splitserve.transport.errors import KeyFileError


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


def test_a_key_is_changed_in_three_steps(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    old = generate_key(path)
    path.with_name("cluster.key.new").write_text("of a step that was killed")
    both = rotate(path, "add")
    assert both.public == old.public
    new = both.pairs[1]
    assert load_key(path) == both
    switched = rotate(path, "switch")
    assert load_key(path) == switched == ClusterKey(new.public, new.secret, old)
    assert rotate(path, "finish") == load_key(path) == new
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_steps_out_of_order_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    key = generate_key(path)
    for step in ("switch", "finish"):
        with pytest.raises(KeyFileError, match="begin with add"):
            rotate(path, step)  # type: ignore[arg-type]
    assert load_key(path) == key
    both = rotate(path, "add")
    with pytest.raises(KeyFileError, match="go on with switch"):
        rotate(path, "add")
    assert load_key(path) == both


def test_three_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    generate_key(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, *lines[1:], *lines[1:]]) + "\n")
    with pytest.raises(KeyFileError, match="damaged"):
        load_key(path)


def test_a_key_file_is_followed_and_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    generate_key(path)
    file = KeyFile(path)
    assert not file.changed()
    both = rotate(path, "add")
    assert file.changed()
    assert file.key == both
    path.write_text("nonsense")
    with pytest.raises(KeyFileError):
        file.changed()
    assert not file.changed()
    assert file.key == both


def test_half_a_key_is_left_by_no_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        with pytest.raises(KeyFileError, match="No space left on device"):
            generate_key(disk.path / "cluster.key")
        assert not (disk.path / "cluster.key").exists()
