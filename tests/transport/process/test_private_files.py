"""Private files are made private, and others are refused with what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from splitserve.transport.process.private_files import (
    OpenToOthers,
    is_open_to_others,
    make_private,
    require_private,
    write_private,
)


def status(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "we", "is_open"),
    [
        (0o600, 1000, 1000, False),
        (0o640, 1000, 1000, True),
        (0o604, 1000, 1000, True),
        (0o440, 0, 1000, False),  # a secret that Kubernetes mounts with an fsGroup
        (0o460, 0, 1000, True),
        (0o444, 0, 1000, True),
        (0o440, 0, 0, True),
        (0o440, 1001, 1000, True),
    ],
)
def test_who_may_open_it(
    monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, we: int, is_open: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: we)
    assert is_open_to_others(status(mode, owner)) == is_open


def test_made_private_whatever_the_umask_and_refused_with_one_command(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    umask = os.umask(0)
    try:
        make_private("it", one)
        write_private(other, "text")
        write_private(other, "new text")
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (one, other)] == [0o600, 0o600]
    assert other.read_text() == "new text"
    assert sorted(tmp_path.iterdir()) == [one, other]
    make_private("it", one)
    one.chmod(0o644)
    other.chmod(0o644)
    with pytest.raises(
        OpenToOthers, match=rf"^it {one} is open to other users \(mode 0644\); run: chmod 600 {one} {other}$"
    ):
        require_private("it", [one, other, tmp_path / "none"])
