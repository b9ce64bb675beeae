"""The pages are held to the code: links lead somewhere, commands can be typed as they stand, what is named is
there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import TypeAdapter

from splitserve.cli.config import COMMON, CONFIG_VARIABLE, SECTIONS, known_names, variable_of
from splitserve.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bench/results").glob("*.md")),
    ROOT / "deploy/demo_model/README.md",
]
SHELL = {"", "sh", "bash", "console"}  # fences of these kinds hold commands
SCRIPTS = {
    "quickstart.sh": "up",
    "coordinator.sh": "coordinator",
    "prefill.sh": "prefill",
    "decode.sh": "decode",
}
OF_OTHERS = {
    "--help",
    "--shm-size",
    "--serve",
    "--numprocesses",
}  # of docker, of deploy/quickstart.sh, of pytest
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Command(NamedTuple):
    """``is_whole``: it stands in a block of its own and not in the middle of a sentence."""

    words: list[str]
    is_whole: bool


def tokens(page: Path) -> Iterator[Token]:
    """Yield the tokens of a page as Markdown, inline ones too."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        yield token
        yield from token.children or []


def inline_code(page: Path) -> list[str]:
    return [" ".join(token.content.split()) for token in tokens(page) if token.type == "code_inline"]


def commands(page: Path) -> Iterator[Command]:
    for token in tokens(page):
        if token.type == "code_block" or (token.type == "fence" and token.info in SHELL):
            for line in token.content.replace("\\\n", " ").splitlines():
                if words := ours(line):
                    yield Command(words, is_whole=True)
        elif token.type == "code_inline" and (words := ours(token.content)):
            yield Command(words, is_whole=False)


def ours(line: str) -> list[str]:
    """Return the words of a command of ours, up to the next one on the line; empty for any other."""
    line = re.sub(r"^(\w*\$)? *(cd tests && |\.\./|\./|\.venv/bin/)*", "", line.strip())
    if not re.match(
        r"splitserve |python -m (splitserve\.[\w.]*\w(?= |$)|simulation )|deploy/\w+\.sh\b", line
    ):
        return []
    words = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", "...")), len(words))
    return words[:end]


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = [
        str(t.attrGet("href") or t.attrGet("src")) for t in tokens(page) if t.type in ("link_open", "image")
    ]
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(linked), (
            f"{target}: no such heading; there are {sorted(anchors(linked))}"
        )


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_command_can_be_typed_as_it_stands(page: Path) -> None:
    for words, is_whole in commands(page):
        program, *rest = words
        if program == "python":
            check_module(rest)
        elif (script := program.rpartition("/")[2]) in SCRIPTS:
            check(
                ["splitserve", SCRIPTS[script], *(word for word in rest if word not in OF_OTHERS)], is_whole
            )
        elif program == "splitserve":
            check(words, is_whole)
        else:
            assert (ROOT / program).is_file(), program


def check(words: list[str], is_whole: bool) -> None:
    """Return click's error; for whole commands the values are checked too."""
    command: click.Command = cli
    rest, names = words[1:], []
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        names.append(rest.pop(0))
        assert names[-1] in command.commands, f"{shlex.join(words)}: there is no command {names[-1]}"
        command = command.commands[names[-1]]
    if not is_whole:
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options_of(
            command
        ) | OF_OTHERS, shlex.join(words)
        return
    values, _, _ = command.make_parser(click.Context(command)).parse_args(
        rest
    )  # raises where an option is unknown or lacks its value
    model = SECTIONS.get("_".join(names))
    for name, value in values.items():
        if model is not None and name in model.model_fields:
            TypeAdapter(model.model_fields[name].rebuild_annotation()).validate_python(value)


def check_module(words: list[str]) -> None:
    """``-m MODULE --option ...``: of bench, deploy, or the simulator."""
    name = words[1]
    path = name.removeprefix("splitserve.").replace(".", "/")
    stem = ROOT / ("tests/simulation" if name == "simulation" else path)
    file = next((each for each in (stem.with_suffix(".py"), stem / "__main__.py") if each.is_file()), None)
    assert file is not None, name
    text = file.read_text(encoding="utf-8")
    assert [word for word in words[2:] if word.startswith("--") and not takes(text, word)] == [], shlex.join(
        words
    )


def takes(program: str, option: str) -> bool:
    """Whether this text of a program declares the option: to argparse or to typer."""
    words = (f'"{option}"', f"    {option[2:].replace('-', '_')}: ", f"to_{option[2:]}=True")
    return any(word in program for word in words)


@each_page
def test_every_option_and_variable_exists(page: Path) -> None:
    known = {name for command in every_command(cli) for name in options_of(command)} | OF_OTHERS
    programs = [
        path.read_text(encoding="utf-8")
        for folder in ("bench", "tools")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for code in inline_code(page):
        if flag := re.match(r"--[a-z][a-z0-9-]*(?<!-)(?![a-z0-9-])", code):
            assert flag[0] in known or any(takes(program, flag[0]) for program in programs), code
    variables = {
        variable_of(name, "" if section == COMMON else section)
        for section, names in known_names().items()
        for name in names
    }
    used = set(re.findall(r"\bSPLITSERVE_[A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8")))
    assert used - variables - {CONFIG_VARIABLE} == set()


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def every_command(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from every_command(command)


@each_page
def test_every_file_that_is_named_is_there(page: Path) -> None:
    named = [code.rstrip("/") for code in inline_code(page) if re.fullmatch(r"[\w.]+/[\w./-]*", code)]
    missing = [name for name in named if name.partition("/")[0] in FOLDERS and not (ROOT / name).exists()]
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [
        page.name
        for page in (ROOT / "docs").glob("*.md")
        if page.name != "README.md" and f"({page.name})" not in index
    ] == []


@each_page
def test_examples_name_the_model_that_is_served(page: Path) -> None:
    """``splitserve up`` alone serves the bundled model, and answers 404 to any other name."""
    for token in tokens(page):
        if token.type == "fence" and token.info in SHELL | {"python"}:
            named = set(re.findall(r"""(?:"model": |\bmodel=)"([^"]+)\"""", token.content))
            assert named <= {"splitserve-demo"}, token.content
