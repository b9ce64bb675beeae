"""Builds of other wire versions, in clusters that are being upgraded.

A process of the *next* build is the present one, but what it sends has more in it: an optional field in each
message and in each message within it, a value of an enumeration and a message that only its like is sent. A
process of a *far* build is no neighbour of either, and calls every field otherwise.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from support.messages import fields_of, structs_in

from splitserve.transport.errors import BadMessage
from splitserve.transport.messages.codec import decode, encode
from splitserve.transport.messages.messages import Hello, Meet, Message, OtherVersion, RequestFailed

if TYPE_CHECKING:
    from simulation.world import World

PRESENT, NEXT, FAR = 0, 1, 3
"""Each is the wire version beyond ours."""
NEW_FIELD = {"since_next": [{"nested": [1.5, None]}, "text"]}
NEW_KIND = {"handoff_failed": "handoff_lost"}
NEW_MESSAGE = b"\x3e\x80"


def may_be_sent_what_is_new(build: int) -> bool:
    """The rule that every later build keeps."""
    return build >= NEXT


class Builds:
    """Carries messages between processes of unequal builds, as bytes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def drawn(self, name: str, number: int) -> int:
        """The build of a process that starts: an upgrade, or the way back."""
        if name.startswith("far"):
            return FAR
        random, share = Random(f"build {self._world.seed} {name} {number}"), self._world.scenario.cluster.next
        return NEXT if random.random() < share else PRESENT

    def across(self, source: str, target: str, message: Message) -> Message | None:
        """What arrives of a message; None: nothing."""
        sender, receiver = self._build_at(source), self._build_at(target)
        if sender == receiver == PRESENT:
            return message
        self._world.counts["messages between builds"] += sender != receiver
        if receiver == FAR or isinstance(message, OtherVersion):
            if sender != receiver and not isinstance(message, OtherVersion):
                self._world.violated(
                    f"{source}: sends {target} a {type(message).__name__}, which it cannot read"
                )
            return message
        try:
            if sender == NEXT and isinstance(message, Hello | Meet) and may_be_sent_what_is_new(receiver):
                self._read_new(NEW_MESSAGE, receiver)
            return self._read(_bytes(message, sender, receiver), type(message), receiver)
        except BadMessage as error:
            if sender != FAR or isinstance(message, Hello | Meet):
                self._world.violated(f"{target}: refuses a message of {source}: {error}")
            return None

    def _read(self, data: bytes, kind: type[Message], receiver: int) -> Message:
        if receiver == NEXT:
            for old, new in NEW_KIND.items():
                data = data.replace(msgspec.msgpack.encode(new), msgspec.msgpack.encode(old))
        found = decode(data, (kind,))
        self._world.counts["messages of other versions"] += isinstance(found, OtherVersion)
        return found

    def _read_new(self, data: bytes, receiver: int) -> None:
        if receiver == PRESENT:
            decode(data, ())

    def _build_at(self, name: str) -> int:
        if (coordinator := self._world.coordinators.get(name)) is not None:
            return coordinator.build
        worker = self._world.workers.get(name)
        return PRESENT if worker is None else worker.process.build


def _bytes(message: Message, sender: int, receiver: int) -> bytes:
    """What leaves. Versions are those that the receiver sees: a neighbour is one apart from itself."""
    fields: dict[str, Any] = fields_of(message)
    if sender == NEXT:
        for place in (fields, *structs_in(message, fields)):
            place |= NEW_FIELD
        if isinstance(message, RequestFailed) and may_be_sent_what_is_new(receiver):
            fields["kind"] = NEW_KIND.get(message.kind, message.kind)
    elif sender == FAR:
        fields = {f"new_{name}" if name != "wire_version" else name: fields[name] for name in fields}
    if "wire_version" in fields:
        fields["wire_version"] += sender - receiver
    return encode(message)[:1] + msgspec.msgpack.encode(fields)
