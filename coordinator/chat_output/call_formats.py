"""How families of models write tool calls: one entry a family, which its parser reads and its grammar forces.

A call is ``opens`` + ``call`` + ``closes``. In ``call`` stand ``$name``, and either ``$arguments``, a JSON
object (or, with ``quote``, one like it), or ``$parameters``: ``parameter`` with its ``$key`` and ``$value``,
once for each, and in ``$string`` whether the value is text or JSON. ``$index`` is the number of the call in
the chat; ``$call_id`` is an id behind its mark, where the tokenizer has that mark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ToolStyle = Literal[
    "hermes", "llama3", "pythonic", "mistral", "qwen3_coder", "glm45", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "granite", "phi4", "kimi_k2", "minimax_m2", "seed_oss", "gpt_oss", "gemma4",
]  # fmt: skip
MARK = re.compile(r"<[|｜][^<>\s]+?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|</?[a-z_:]+>|\[[A-Z_]+\]")
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One family's way. ``between``: text between two calls; None: the family was taught one call at a time.
    Without ``opens`` the whole answer is calls."""

    call: str
    opens: str = ""
    closes: str = ""
    between: str | None = None
    section: tuple[str, str] = ("", "")  # marks around all calls
    parameter: str = ""
    listed: bool = False  # ``opens`` and ``closes`` stand around one list, in brackets, of all calls
    also: tuple[str, ...] = ()  # other marks that open a call, which are read and never forced
    quote: str = ""  # the mark around texts within ``$arguments``, whose keys stand bare; without it: JSON

    @property
    def body(self) -> Literal["object", "named", "parameters", "python"]:
        """How name and arguments are written: as one object, one after the other, each argument between
        marks, or as Python writes a call."""
        if "$parameters" in self.call:
            return "python" if self.listed else "parameters"
        return "object" if '"name"' in self.call else "named"

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks after which a call, or a list of calls, may begin."""
        return (*([self.opens] if self.opens else ()), *self.also)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks; any may be a token of its own."""
        ids = (CALL_ID,) if "$call_id" in self.call else ()
        return (*dict.fromkeys(MARK.findall(self.text)), *ids)

    @property
    def text(self) -> str:
        """All that is written around names and arguments."""
        return " ".join((*self.section, *self.openers, self.call, self.closes, self.parameter, self.quote))


OBJECT = '{"name": $name, "arguments": $arguments}'
_PYTHON_TAGS = ("<|python_tag|>", "<|python_start|>")
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FORMATS: dict[ToolStyle, CallFormat] = {
    "hermes": CallFormat(f"\n{OBJECT}\n", "<tool_call>", "</tool_call>", between="\n"),
    "llama3": CallFormat('{"name": $name, "parameters": $arguments}', also=_PYTHON_TAGS),
    "pythonic": CallFormat(
        "$name($parameters)", between=", ", parameter="$key=$value", listed=True, also=_PYTHON_TAGS
    ),
    "mistral": CallFormat("$name$call_id[ARGS]$arguments", "[TOOL_CALLS]", between=""),
    "qwen3_coder": CallFormat(
        "\n<function=$name>\n$parameters</function>\n",
        *("<tool_call>", "</tool_call>"),
        between="\n",
        also=("<function=",),
        parameter="<parameter=$key>\n$value\n</parameter>\n",
    ),
    "glm45": CallFormat(
        "$name\n$parameters",
        *("<tool_call>", "</tool_call>"),
        between="\n",
        parameter="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
    ),
    "deepseek_v3": CallFormat(
        "function<｜tool▁sep｜>$name\n```json\n$arguments\n```",
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        between="\n",
        section=_DEEPSEEK_CALLS,
    ),
    "deepseek_v31": CallFormat(
        "$name<｜tool▁sep｜>$arguments",
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        between="",
        section=_DEEPSEEK_CALLS,
    ),
    "deepseek_v32": CallFormat(
        ' name="$name">\n$parameters',
        *("<｜DSML｜invoke", "</｜DSML｜invoke>"),
        between="\n",
        section=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
        parameter='<｜DSML｜parameter name="$key" string="$string">$value</｜DSML｜parameter>\n',
    ),
    "granite": CallFormat(OBJECT, "<|tool_call|>", between=", ", listed=True, also=("<tool_call>",)),
    "phi4": CallFormat(
        OBJECT, "<|tool_call|>", "<|/tool_call|>", between=", ", listed=True, also=("functools",)
    ),
    "kimi_k2": CallFormat(
        "functions.$name:$index<|tool_call_argument_begin|>$arguments",
        *("<|tool_call_begin|>", "<|tool_call_end|>"),
        between="",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "minimax_m2": CallFormat(
        ' name="$name">\n$parameters',
        *("<invoke", "</invoke>"),
        between="\n",
        section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        parameter='<parameter name="$key">$value</parameter>\n',
    ),
    "seed_oss": CallFormat(
        "\n<function=$name>\n$parameters</function>\n",
        *("<seed:tool_call>", "</seed:tool_call>"),
        between="\n",
        parameter="<parameter=$key>$value</parameter>\n",
    ),
    "gpt_oss": CallFormat(
        "$name <|constrain|>json<|message|>$arguments", "<|channel|>commentary to=functions."
    ),
    "gemma4": CallFormat("call:$name$arguments", "<|tool_call>", "<tool_call|>", between="", quote='<|"|>'),
}
MISTRAL_LIST = CallFormat(OBJECT, "[TOOL_CALLS]", between=", ", listed=True)
"""What Mistral's models write whose tokenizer has no ``[ARGS]``."""
