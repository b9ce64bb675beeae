"""A server whose model answers with a given tool call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Roma"]}},
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "Paris", "days": 3}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "temperature": 0}
Answering = Callable[..., Any]
