"""The demo model's answers about the language, word for word from CPython's pydoc topics and docstrings.

language_facts.toml chooses the sentences. This module finds them and removes mark-up
and references to other pages.
"""

import inspect
import platform
import re
import tomllib
from functools import cache
from pathlib import Path
from pydoc import locate
from pydoc_data.topics import topics

from train_demo.docstring_prose import SENTENCE_END

TABLE = tomllib.loads((Path(__file__).parent / "language_facts.toml").read_text(encoding="utf-8"))
DOCSTRING = "doc "  # prefix of a docstring's object; a source without it is a pydoc topic
UNDERLINE = re.compile(r"\s*([=*\-~^])\1+\s*")
WHOLE = (".", "!", "?", ".)")
SENTENCES = re.compile(rf"{SENTENCE_END.pattern}|(?<=[.!?][)'\"])\s+(?=[A-Z])")
ANNOUNCED = re.compile(r"(,? for example|,? e\.g\.)?:$")
LIST_ITEM = re.compile(r"(?:^|\n)\s*(?:[*+]|\d+\.) ")
DEFINED = re.compile(
    r"( *)([^\s\[][^\n]*)\n(\1 +\S.*)", re.DOTALL
)  # a term, and indented below it what it means
EMPHASIS = re.compile(r"(?<![\w\"*])\*{1,2}([^*\"\s](?:[^*\"]*[^*\"\s])?)\*{1,2}(?![\w*\"])")
CODE = re.compile(
    r"``([^`]+)``|`([^`]+)`|\"(\\|\"|[^\"]+)\""
)  # reST's literals are in double quotes in the topics
REFERENCE = re.compile(
    r"(?:^|\s)\[\d\](?!\w)"  # a footnote
    r"|\s*\((?:[Ss]ee|described in|discussed in) [^()]*(?:\(\)[^()]*)*\)|; see [A-Z][^.;]*(?=\.)"
    r"|:\w+:(?=`)"  # a role
)
TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": " - ", "–": "-", "…": "..."})


def language_facts() -> list[tuple[tuple[str, ...], str]]:
    """Every subject's names and its text; ValueError if a choice does not name exactly one sentence."""
    return [
        (tuple(names.split(" | ")), joined([sentence(choice) for choice in choices]))
        for names, choices in TABLE["facts"].items()
    ]


def sentence(choice: str) -> str:
    """The one sentence of "source > its first words"."""
    source, _, begin = choice.partition(" > ")
    found = [text for paragraph in paragraphs(source) for text in paragraph if text.startswith(begin)]
    if len(found) != 1:
        raise ValueError(
            f"language_facts.toml: {len(found)} sentences, not one, of {source!r} begin with {begin!r} "
            f"(chosen with Python {TABLE['python']}; this is {platform.python_version()})"
        )
    return found[0]


def joined(sentences: list[str]) -> str:
    """One text: what announced an example ends like a sentence, and a term gets a colon before what it
    means."""
    text = ""
    for part, after in zip(sentences, [*sentences[1:], ""], strict=True):
        if part.endswith(WHOLE):
            end = ""
        elif after[:1].islower():
            end = ":" if part.endswith(":") else "" if part.endswith(";") else ";"
        else:
            end = ":" if after and not part.endswith(":") else "."
        text += ANNOUNCED.sub("", part) + end + " "
    return text.strip()


@cache
def paragraphs(source: str) -> list[list[str]]:
    """The sentences of each paragraph, heading and list item of a pydoc topic or of a docstring ("doc open"),
    as plain text."""
    text = (
        inspect.getdoc(locate(source.removeprefix(DOCSTRING)))
        if source.startswith(DOCSTRING)
        else topics[source]
    )
    kept = []
    for paragraph in re.split(r"\n\s*\n", (text or "").strip("\n")):
        lines = [line for line in paragraph.split("\n") if not UNDERLINE.fullmatch(line)]
        first, *others = LIST_ITEM.split("\n".join(lines))
        term = DEFINED.match(first)
        kept += [
            _plain(text) for text in (*([term[2], term[3]] if term else [first]), *others) if text.strip()
        ]
    return [SENTENCES.split(text) for text in kept]


def _plain(text: str) -> str:
    """One line without emphasis, quotes of code, footnotes and pointers to other pages, and with quotes and
    dashes of ASCII."""
    line = re.sub(r"\s+", " ", re.sub(r"(?<=\w-)\n\s*", "", text)).strip()
    line = REFERENCE.sub("", EMPHASIS.sub(r"\1", line))
    line = CODE.sub(lambda found: found[1] or found[2] or found[3], line).translate(TYPOGRAPHY)
    return re.sub(r" {2,}", " ", line).strip()
