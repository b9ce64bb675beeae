"""Readable English from docstrings: first sentences without signatures, doctests and markup, with the thing's
name."""

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

MAX_PROSE_CHARS = 220
MAX_SENTENCE_CHARS = 280  # of a first sentence, which is kept even where it is long
MAX_SIGNATURE_CHARS = 90
SIGNATURE_LINE = re.compile(r"^[\w.]+\(.*?\)\s*(->.*|--.*|:)?$|^[\w.]+\([^)]*$|^.*->.*$")
NOT_PROSE = re.compile(r">>>|^\s*[-*=]|---|===|::|^\s|\|")
SENTENCE_END = re.compile(r"(?<=[\w)'\"][.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)(?<!etc\.)\s+")
STATEMENT = re.compile(
    r"\b(is|are|allow|provides|simulates)\b"
)  # in what begins with "The": a whole sentence
ANNOUNCES_MORE = (":", "e.g.", "i.e.")
SCOPE = tomllib.loads((Path(__file__).parent / "stdlib_scope.toml").read_text(encoding="utf-8"))
IMPERATIVES = set(SCOPE["imperatives"]["verbs"].split())
THIRD_PERSON = {verb + ending for verb in IMPERATIVES for ending in ("s", "es")}


def prose(member: Any) -> str | None:
    """The first sentences of a docstring; None where there is nothing readable of its own."""
    doc = inspect.getdoc(member)
    if not doc or doc in (inspect.getdoc(type(member)), object.__doc__, object.__init__.__doc__):
        return None
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc.strip()):
        lines = paragraph.split("\n")
        while lines and SIGNATURE_LINE.match(lines[0].strip()):
            lines.pop(0)
        if not lines:
            continue
        text = " ".join(line.strip() for line in lines)
        if NOT_PROSE.search(text) or any(line.startswith((" ", "\t")) for line in lines[1:]):
            break
        kept.append(text if text.endswith((".", "!", "?", ":")) else text + ".")
        if text.endswith(":") or sum(map(len, kept)) > MAX_SENTENCE_CHARS:
            break
    return _clip(_without_markup(" ".join(kept)))


def about(name: str, text: str, lead: str) -> str:
    """Prose as a statement about name: 'Join two paths.' becomes 'os.path.join joins two paths.'

    What is no verb and no 'A ...' follows the lead, as in 'functools.lru_cache is a function:
    least-recently-used ...'.
    """
    first, _, rest = text.partition(" ")
    word = first.lower().rstrip(",.;")
    if word in IMPERATIVES and rest and first[0].isupper():
        return f"{name} {_third_person(word)}{first[len(word) :]} {rest}"
    if word in THIRD_PERSON and rest:
        return f"{name} {word} {rest}"
    if first in ("A", "An") or (first == "The" and not STATEMENT.search(first_sentence(text))):
        return f"{name} is {word} {rest}"
    if first == "The" and name.rpartition(".")[2] in rest.split()[:2]:
        return text
    is_name = len(first) == 1 or first[1:] != first[1:].lower()
    return f"{lead}: {text if is_name else text[0].lower() + text[1:]}"


def first_sentence(text: str) -> str:
    return SENTENCE_END.split(text)[0]


def call_signature(member: Any, is_method: bool) -> str | None:
    """The arguments in parentheses as a caller sees them; None where they cannot be read or do not print
    well."""
    try:
        signature = inspect.signature(member)
    except (ValueError, TypeError):  # many builtins have no signature that can be read
        return None
    parameters = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    if is_method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    text = str(inspect.Signature(parameters)).replace("(/, ", "(").replace(", /)", ")").replace(", /,", ",")
    return text if len(text) <= MAX_SIGNATURE_CHARS and "<" not in text and " at 0x" not in text else None


def _without_markup(text: str) -> str:
    text = re.sub(r":\w+:`([^`]*)`", r"\1", text)
    text = re.sub(r"`+|\*(\w[\w ]*)\*", lambda found: found.group(1) or "", text)
    return re.sub(r"\s+", " ", text).strip()


def _clip(text: str) -> str | None:
    """Keep as many whole sentences as fit, up to one that only announces an example or a list."""
    kept = ""
    for sentence in SENTENCE_END.split(text):
        limit = MAX_PROSE_CHARS if kept else MAX_SENTENCE_CHARS
        if len(kept) + len(sentence) > limit or sentence.endswith(ANNOUNCES_MORE):
            break
        kept = f"{kept} {sentence}".strip()
    return kept if len(kept) > 12 and kept.isascii() else None


def _third_person(verb: str) -> str:
    if verb in ("have", "recursively"):
        return {"have": "has"}.get(verb, verb)
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"
