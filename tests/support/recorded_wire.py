"""The messages of each wire version as bytes, and the shape of their types: ``transport/messages/wire``.

PYTHONPATH=tests python -m support.recorded_wire        # after WIRE_VERSION was raised
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from support.messages import EXAMPLES

from splitserve.transport.messages.codec import WIRE, encode
from splitserve.transport.messages.fields import WIRE_VERSION

FOLDER = Path(__file__).parents[1] / "transport" / "messages" / "wire"
Shape: TypeAlias = dict[str, dict[str, Any]]
"""By message, by field: its JSON schema, and whether it is required."""


def recorded(version: int) -> dict[str, Any]:
    """Return the ``messages`` in hex, and the ``shape``, of this version."""
    record: dict[str, Any] = json.loads((FOLDER / f"{version}.json").read_text())
    return record


def present_messages() -> dict[str, str]:
    return {type(example).__name__: encode(example).hex() for example in EXAMPLES}


def present_shape() -> Shape:
    _, types = msgspec.json.schema_components([kind for kind, _ in WIRE.values()])
    shape: Shape = json.loads(json.dumps({name: _fields(schema) for name, schema in types.items()}))
    return shape


def breaks(old: Shape, new: Shape) -> list[str]:
    """Return what of ``new`` a process that knows ``old`` cannot skip, and the other way round."""
    found = [f"{name} is gone" for name in old.keys() - new.keys()]
    for name in old.keys() & new.keys():
        found += [f"{name}.{field} is gone" for field in old[name].keys() - new[name].keys()]
        for field, schema in new[name].items():
            before = old[name].get(field)
            if before is None and schema["required"]:
                found.append(f"{name}.{field} is required")
            elif before is not None and not _may_become(before, schema):
                found.append(f"{name}.{field} has changed")
    return sorted(found)


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    required = schema.get("required", ())
    fields = {
        name: {**field, "required": name in required} for name, field in schema.get("properties", {}).items()
    }
    if "wire_version" in fields:
        del fields["wire_version"]["default"]
    return fields


def _may_become(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """An enumeration may gain values, which older processes are never sent."""
    values = before.get("enum", ())
    if values and set(values) <= set(after.get("enum", ())):
        after = {**after, "enum": values}
    return before == after


def main() -> None:
    record = {"messages": present_messages(), "shape": present_shape()}
    (FOLDER / f"{WIRE_VERSION}.json").write_text(_pages(record))


def _pages(record: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each message of each part."""
    parts = []
    for part, entries in record.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
        parts.append(f' "{part}": {{\n{lines}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
