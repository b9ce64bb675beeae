"""Bugs for test_teeth.py, put into what lets processes of unequal wire versions work together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from simulation import builds

from splitserve.coordinator.lifecycle.membership import Membership
from splitserve.transport.errors import BadMessage
from splitserve.transport.messages import codec
from splitserve.transport.messages.fields import WIRE_VERSION

Patch = pytest.MonkeyPatch


def refuse_the_fields_of_a_newer_process(patch: Patch) -> None:
    def broken(data: bytes, allowed: Any) -> Any:
        message = codec.decode(data, allowed)
        if unknown := set(msgspec.msgpack.decode(data[1:])) - set(message.__struct_fields__):
            raise BadMessage(f"unknown fields {unknown}")
        return message

    patch.setattr(builds, "decode", broken)


def send_what_is_new_to_older_processes(patch: Patch) -> None:
    patch.setattr(builds, "may_be_sent_what_is_new", lambda build: True)


def work_with_equal_versions_only(patch: Patch) -> None:
    patch.setattr(codec, "is_neighbour", lambda version: version == WIRE_VERSION)


def work_with_every_version(patch: Patch) -> None:
    patch.setattr(codec, "is_neighbour", lambda version: True)


def forget_which_workers_are_refused(patch: Patch) -> None:
    patch.setattr(Membership, "refused", lambda self, now: {})


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (refuse_the_fields_of_a_newer_process, "upgrades"),
    (send_what_is_new_to_older_processes, "upgrades"),
    (work_with_equal_versions_only, "upgrades"),
    (work_with_every_version, "upgrades"),
    (forget_which_workers_are_refused, "upgrades"),
]
"""Each with the scenario in which it is found quickly."""
