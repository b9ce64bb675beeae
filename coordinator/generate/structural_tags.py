"""Structural tags: text that is free until a trigger and bound from there, as vLLM, SGLang and xgrammar take
them. https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html

A format becomes a rule of llguidance's Lark. ``Follow`` is what ends it: a free text ends at the first of
these strings, and the rule takes that string, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import orjson

from ..chat_output.call_formats import FORMATS, MARK, ToolStyle
from ..errors import WrongField
from .bodies.output_format import Kind, OutputFormat, grammar_of
from .call_grammar import ANYTHING, parts_of
from .parameter_grammar import Term, escaped, parameter_rules, terms

Follow = tuple[str, ...] | None
"""Empty strings: the format stands last. None: what follows does not end a free text."""
LAST = ("",)
STYLES: dict[str, ToolStyle] = {"qwen_xml": "qwen3_coder", "glm_xml": "glm45", "deepseek_xml": "deepseek_v32"}
MAX_REPEATS = 1000
Format = dict[str, Any]


def structural_grammar(wanted: OutputFormat, term: Term) -> bytes:
    """Return the grammar for llguidance, not compiled yet. Raises InvalidRequest."""
    tree = wanted.value.get("format")
    try:
        if tree is None:
            tags = [_of_structure(each) for each in wanted.value["structures"]]
            tree = {"type": "triggered_tags", "triggers": wanted.value["triggers"], "tags": tags}
        return _Rules(wanted.param, term).grammar(tree)
    except KeyError as error:
        fault = f"a structural tag lacks the field {error}"
    except (TypeError, ValueError, AttributeError) as error:
        fault = f"the structural tag cannot be read: {error}"
    except RecursionError:
        fault = "the structural tag is nested too deeply"
    raise WrongField(wanted.param, fault)


def _of_structure(given: Format) -> Format:
    """Return the tag that the older form calls a structure."""
    known = _fields(given, "begin", "schema", "end")
    return {
        "begin": known["begin"],
        "content": {"type": "json_schema", "json_schema": known.get("schema", {})},
        "end": known["end"],
    }


def _fields(given: Format, *names: str) -> Format:
    """Return the fields that are given. Raises ValueError for one that is not built."""
    if not isinstance(given, dict):
        raise ValueError("each format must be an object")
    found = {name: value for name, value in given.items() if value not in (None, False, [])}
    if unknown := sorted(found.keys() - {"type", *names}):
        kind = given.get("type", "structures")
        raise ValueError(f"{unknown[0]!r} of {kind!r} is not built; known: {', '.join(names)}")
    return {name: value for name, value in given.items() if value is not None}


class _Rules:
    """Writes one rule a format."""

    def __init__(self, param: str, term: Term) -> None:
        self._param, self._term = param, term
        self._rules: list[str] = []
        self._leaves: list[dict[str, Any]] = []
        self._makers: dict[str, Callable[[Format, Follow], str]] = {
            "const_string": self._const, "json_schema": self._schema, "grammar": self._grammar,
            "qwen_xml_parameter": self._schema, "regex": self._grammar, "any_text": self._text,
            "sequence": self._sequence, "or": self._or, "optional": self._repeated,
            "plus": self._repeated, "star": self._repeated, "repeat": self._repeated, "tag": self._tag,
            "triggered_tags": self._triggered, "tags_with_separator": self._separated,
            "dispatch": self._dispatch, "token": self._const,
        }  # fmt: skip

    def grammar(self, tree: Format) -> bytes:
        """Return the whole grammar."""
        start = f"start: {self.of(tree, LAST)}"
        outer = {"name": "start", "lark_grammar": "\n".join([start, *self._rules])}
        return orjson.dumps({"grammars": [outer, *self._leaves]})

    def of(self, given: Format, follow: Follow) -> str:
        """Return the name of the rule of a format; unless ``follow`` is None it takes the end, too."""
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in self._makers:
            raise ValueError(f"type {kind!r} is not built; known: {', '.join(self._makers)}")
        return self._rule(self._makers[kind](given, follow))

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"f_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _end(self, follow: Follow) -> str:
        return "" if follow is None else f"({_any_of(map(self._string, follow))})"

    def _string(self, text: str) -> str:
        return terms(text, self._term) or '""'

    def _const(self, given: Format, follow: Follow) -> str:
        if given["type"] == "const_string":
            text = self._string(_fields(given, "value")["value"])
        else:
            token = _fields(given, "token")["token"]
            text = f"<[{token}]>" if isinstance(token, int) else self._term(token)
        return f"{text} {self._end(follow)}"

    def _leaf(self, kind: Kind, value: Any) -> str:
        name = f"leaf_{len(self._leaves)}"
        (part,) = parts_of(grammar_of(OutputFormat(kind, value, self._param, lenient=True)))
        self._leaves.append({**part, "name": name})
        return f"@{name}"

    def _grammar(self, given: Format, follow: Follow) -> str:
        if given["type"] == "regex":
            leaf = self._leaf("regex", _fields(given, "pattern")["pattern"])
        else:
            leaf = self._leaf("grammar", _fields(given, "grammar")["grammar"])
        return f"{leaf} {self._end(follow)}"

    def _schema(self, given: Format, follow: Follow) -> str:
        known = _fields(given, "json_schema", "style")
        schema = {} if known["json_schema"] is True else known["json_schema"]
        if not isinstance(schema, dict):
            raise ValueError("json_schema must be an object")
        style = known.get("style", "json" if given["type"] == "json_schema" else "qwen_xml")
        if style == "json":
            return f"{self._leaf('json', orjson.dumps(schema).decode())} {self._end(follow)}"
        if style not in STYLES:
            raise ValueError(f"style {style!r} is not built; known: json, {', '.join(STYLES)}")
        number = len(self._rules)
        self._rules += "\n".join(
            parameter_rules(FORMATS[STYLES[style]], number, schema, self._term, lenient=True)
        ).splitlines()
        return f"args_{number} {self._end(follow)}"

    def _text(self, given: Format, follow: Follow) -> str:
        return self._free(_fields(given, "excludes").get("excludes", ()), follow)

    def _free(self, excludes: Iterable[str], follow: Follow) -> str:
        """Return free text up to the first of ``follow``, and that."""
        if follow is None:
            raise ValueError("free text must stand last, or before a const_string or a tag's end")
        return _any_of([self._until(end, excludes) for end in follow])

    def _until(self, end: str, excludes: Iterable[str] = ()) -> str:
        without = "".join(f" & ~/(?s:.*){escaped(text)}(?s:.*)/" for text in excludes)
        own = [mark for mark in MARK.findall(end) if not self._term(mark).startswith('"')]
        if own or not end:  # a special token ends any text
            rest = end[end.index(own[0]) :] if own else ""
            name = f"T_{len(self._rules)}"
            self._rules.append(f"{name}: {ANYTHING}{without}")
            return f"{name} {terms(rest, self._term)}"
        return self._rule(f"{ANYTHING}{without}", f"[suffix={orjson.dumps(end).decode()}]")

    def _sequence(self, given: Format, follow: Follow) -> str:
        parts: list[str] = []
        elements = list(_fields(given, "elements")["elements"])
        while elements:
            first, *elements = elements
            then = elements[0] if elements else {}
            if first.get("type") == "any_text" and then.get("type") == "const_string":
                parts.append(self.of(first, (then["value"],)))
                elements = elements[1:]
                parts += [self._end(follow)] if not elements else []
            elif first.get("type") == "any_text" and then.get("type") == "tag":
                raise ValueError("any_text before a tag: use triggered_tags")
            else:
                parts.append(self.of(first, None if elements else follow))
        return " ".join(parts) or self._end(follow) or '""'

    def _or(self, given: Format, follow: Follow) -> str:
        return _any_of([self.of(each, follow) for each in _fields(given, "elements")["elements"]])

    def _repeated(self, given: Format, follow: Follow) -> str:
        known = _fields(given, "content", "min", "max")
        inner, low, high = self.of(known["content"], None), known.get("min"), known.get("max")
        times = {"optional": "?", "plus": "+", "star": "*"}.get(given["type"])
        if times is None:
            if not (isinstance(low, int) and isinstance(high, int) and 0 <= low <= MAX_REPEATS >= high):
                raise ValueError(
                    f"min and max of 'repeat' must be numbers up to {MAX_REPEATS}; max may be -1"
                )
            times = f"{{{low},{'' if high < 0 else high}}}"
        return f"({inner}){times} {self._end(follow)}"

    def _tag(self, given: Format, follow: Follow, taken: str = "") -> str:
        """``taken``: how the tag's beginning starts, which has been read."""
        known = _fields(given, "begin", "content", "end")
        begin, end = known["begin"], known["end"]
        ends = tuple(end) if isinstance(end, list) else (end,)
        if not all(isinstance(text, str) for text in (begin, *ends)):
            raise ValueError("'begin' and 'end' of a tag must be strings")
        content = self.of(known["content"], ends if any(ends) else follow)
        after = self._end(follow) if any(ends) else ""
        return f"{self._string(begin.removeprefix(taken))} {content} {after}"

    def _triggered(self, given: Format, follow: Follow) -> str:
        known = _fields(given, "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
        groups: dict[str, list[Format]] = {}
        for tag in known["tags"]:
            groups.setdefault(_trigger(self._term, tag["begin"], known["triggers"]), []).append(tag)
        excludes, once = known.get("excludes", ()), known.get("stop_after_first")
        must, end = known.get("at_least_one"), self._end(follow)
        first = self._rule(_any_of([self._rule(self._tag(tag, None)) for tag in known["tags"]]))
        if must and once:
            return f"{first} {end}"
        after = {
            trigger: self._rule(_any_of([self._rule(self._tag(tag, None, trigger)) for tag in tags]))
            for trigger, tags in groups.items()
        }
        called = self._rule(_any_of([f"{self._until(t, excludes)} {rule}" for t, rule in after.items()]))
        tail = self._rule(self._free(excludes, follow))
        if once:
            return f"{called} {end} | {tail}"
        return f"{first if must else ''} ({called})* {tail}"

    def _separated(self, given: Format, follow: Follow) -> str:
        known = _fields(given, "tags", "separator", "at_least_one", "stop_after_first")
        one = self._rule(_any_of([self._rule(self._tag(tag, None)) for tag in known["tags"]]))
        more = "" if known.get("stop_after_first") else f"({self._string(known['separator'])} {one})*"
        several = self._rule(f"{one} {more}")
        return f"({several}){'' if known.get('at_least_one') else '?'} {self._end(follow)}"

    def _dispatch(self, given: Format, follow: Follow) -> str:
        known = _fields(given, "rules", "loop", "excludes")
        tags = [{"begin": begin, "content": content, "end": ""} for begin, content in known["rules"]]
        return self._triggered(
            {
                "type": "triggered_tags", "triggers": [tag["begin"] for tag in tags], "tags": tags,
                "stop_after_first": known.get("loop") is False, "excludes": known.get("excludes"),
            },
            follow,
        )  # fmt: skip


def _trigger(term: Term, begin: str, triggers: list[str]) -> str:
    """Return the trigger of a tag: the special token that it begins with, if that is longer."""
    found = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
    if len(found) != 1:
        raise ValueError(f"the tag {begin[:100]!r} must begin with one of 'triggers', not {len(found)}")
    mark = MARK.match(begin)
    apart = mark is not None and not term(mark[0]).startswith('"')
    return mark[0] if mark is not None and apart and len(mark[0]) > len(found[0]) else found[0]


def _any_of(names: Iterable[str]) -> str:
    return " | ".join(names)
