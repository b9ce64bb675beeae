"""Answers as the families of models write them, by hand and apart from the product's table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from splitserve.coordinator.chat_output.call_formats import ToolStyle
from splitserve.coordinator.chat_output.events import CallArguments, CallStarted, Content, Event

Call = tuple[str, dict[str, Any]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {_json(arguments)}}}' for name, arguments in calls]


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls))


def _pythonic(calls: Sequence[Call]) -> str:
    written = (f"{n}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for n, arguments in calls)
    return f"[{', '.join(written)}]"


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return _functions(calls, "tool_call", "\n")


def _functions(calls: Sequence[Call], mark: str, around: str) -> str:
    text = []
    for name, arguments in calls:
        given = "".join(
            f"<parameter={k}>{around}{_plain(v)}{around}</parameter>\n" for k, v in arguments.items()
        )
        text.append(f"<{mark}>\n<function={name}>\n{given}</function>\n</{mark}>")
    return "\n".join(text)


def _glm45(calls: Sequence[Call]) -> str:
    text = []
    for name, arguments in calls:
        given = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items()
        )
        text.append(f"<tool_call>{name}\n{given}</tool_call>")
    return "\n".join(text)


def _deepseek(inner: Callable[[str, str], str], between: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        text = between.join(
            f"<｜tool▁call▁begin｜>{inner(name, _json(arguments))}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        return f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>"

    return write


def _deepseek_v32(calls: Sequence[Call]) -> str:
    text = []
    for name, arguments in calls:
        given = "".join(
            f'<｜DSML｜parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">{_plain(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in arguments.items()
        )
        text.append(f'<｜DSML｜invoke name="{name}">\n{given}</｜DSML｜invoke>')
    inner = "\n".join(text)
    return f"<｜DSML｜function_calls>\n{inner}\n</｜DSML｜function_calls>"


def _kimi_k2(calls: Sequence[Call]) -> str:
    mark = "<|tool_call_argument_begin|>"
    text = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}{mark}{_json(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"


def _minimax_m2(calls: Sequence[Call]) -> str:
    text = []
    for name, arguments in calls:
        given = "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in arguments.items())
        text.append(f'<invoke name="{name}">\n{given}</invoke>')
    inner = "\n".join(text)
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def _seed_oss(calls: Sequence[Call]) -> str:
    return _functions(calls, "seed:tool_call", "")


def _gpt_oss(calls: Sequence[Call]) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        for name, arguments in calls
    )


def _gemma4(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_bare(arguments)}<tool_call|>" for name, arguments in calls)


def _bare(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return f"{{{','.join(f'{key}:{_bare(each)}' for key, each in value.items())}}}"
        case list():
            return f"[{','.join(map(_bare, value))}]"
        case _:
            return json.dumps(value)


WRITERS: dict[ToolStyle, Callable[[Sequence[Call]], str]] = {
    "hermes": _hermes,
    "llama3": lambda calls: "; ".join(_objects(calls, "parameters")),
    "pythonic": _pythonic,
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls),
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "deepseek_v3": _deepseek(lambda n, given: f"function<｜tool▁sep｜>{n}\n```json\n{given}\n```", "\n"),
    "deepseek_v31": _deepseek(lambda n, given: f"{n}<｜tool▁sep｜>{given}", ""),
    "deepseek_v32": _deepseek_v32,
    "granite": lambda calls: f"<|tool_call|>[{', '.join(_objects(calls))}]",
    "phi4": lambda calls: f"<|tool_call|>[{', '.join(_objects(calls))}]<|/tool_call|>",
    "kimi_k2": _kimi_k2,
    "minimax_m2": _minimax_m2,
    "seed_oss": _seed_oss,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
}


STYLES = list(WRITERS)
BARE: tuple[ToolStyle, ...] = ("llama3", "pythonic")
"""Calls are the whole answer."""


def calls_in(events: Sequence[Event]) -> list[Call]:
    """The calls, with their arguments decoded."""
    names = [event.name for event in events if isinstance(event, CallStarted)]
    texts = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.call] += event.text
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def content_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))
