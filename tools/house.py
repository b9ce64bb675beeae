"""Count what keeps the code readable: files, lines, methods, words.

    python tools/house.py                     all counts, beside their targets
    python tools/house.py --list words cli    where: files, classes, lines, words or names, in a folder
    python tools/house.py --request           files that one streamed chat executes (starts a cluster)
    python tools/house.py --root CHECKOUT     the same of another checkout
    python tools/house.py --json              as JSON
    python tools/house.py --tighten           lower the limits that tests/tools/test_house.py holds

It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tests/tools/house_limits.json"
PRODUCT = (
    "kernels", "transport", "engine", "prefill", "decode", "worker",
    "coordinator", "steering", "traces", "planner", "loadgen", "cli", "deploy",
)  # fmt: skip
OTHERS = ("bench", "tests", "tools")
MAX_FILE_LINES, MAX_METHODS, MAX_LINE = 300, 20, 110
TARGETS = {
    "product lines": 40_000,
    "files over 300 lines": 0,
    "classes over 20 methods": 0,
    "lines over 110 characters": 0,
    "private words": 0,
    "private names": 0,
    "words of docs": 25_000,
    "hard dependencies": 20,
    "files of a request": 50,
}
PEOPLE = (
    "people", "person", "anyone", "someone", "everyone", "nobody", "those", "user", "users", "operator",
    "operators", "reader", "attacker", "engineer", "tenant", "human",
)  # fmt: skip
PRIVATE = re.compile(
    "|".join(
        (
            r"\b(?:whoever|whosoever|whom)\b",
            "".join(f"(?<!{word} )(?<!{word}, )" for word in PEOPLE) + r"\bwho\b(?!')",
            r"\b(?:of|than|to|by|as|from) what\b(?! (?:is called|it is))",
            r"(?<!not )\bso (?:many|much|long|often|few)\b",
            r"\b(?:says?|said|saying|tells?|telling|told|hears?|heard|unheard)\b",
            r"\b(?:stirs?|stirred|bury|buries|buried|owes?|owed|foretells?|foretold|untold)\b",
            r"\b(?:doomed|hopeless|strange|stranger|strangers|unsure)\b",
            r"\b(?:that|which) (?:is|are|has|have) none\b|\bwhere (?:it|that) is none\b",
            r"\bis had\b|\bbut for\b(?! example)",
            r"\b(?:lest|thence|whence|whereof|thereupon|whereupon|nought)\b",
        )
    ),
    re.IGNORECASE,
)
PRIVATE_NAME = re.compile(
    r"(?:^|_)(?:stirs?|bury|owes?|owed|foretell|foretold|untold|doomed|hopeless|strange|unsure|says?|said"
    r"|tells?|told|hears?|heard|(?<!in_)flights?)(?=_|$)|Flight|WaitingLine"
)
FRAGMENT = re.compile(r"(?:Of|Who|Whose|Where|Than|As|To) (?!use\b)[a-z]")  # opens a docstring without a verb


class Place(NamedTuple):
    """One finding: a count's name, where it is, and the text to look at."""

    count: str
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def findings(root: Path) -> Iterator[Place]:
    """Everything that a target of zero forbids, in all folders and pages."""
    for folder in (*PRODUCT, *OTHERS):
        for path in sorted((root / folder).rglob("*.py")):
            yield from _in_file(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    for path in _pages(root):
        for number, line in enumerate(_prose_of_page(path), 1):
            for match in PRIVATE.finditer(line):
                yield Place("private words", str(path.relative_to(root)), number, _around(line, match))


def _in_file(name: str, text: str) -> Iterator[Place]:
    lines = text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield Place("files over 300 lines", name, 1, f"{len(lines)} lines")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            yield Place("lines over 110 characters", name, number, f"{len(line)} characters")
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            if methods > MAX_METHODS and not name.startswith("tests/"):
                yield Place("classes over 20 methods", name, node.lineno, f"{node.name}: {methods} methods")
        for defined in _defined_names(node):
            if PRIVATE_NAME.search(defined):
                yield Place("private names", name, getattr(node, "lineno", 1), defined)
    for number, prose, opens in _prose(text, nodes):
        if opens and FRAGMENT.match(prose.lstrip()):
            yield Place("private words", name, number, prose.strip().splitlines()[0])
        for offset, line in enumerate(prose.splitlines()):
            line = re.sub(r"``[^`]*``|`[^`]*`|\"[^\"]*\"", "", line)  # code and quotations
            for match in PRIVATE.finditer(line):
                yield Place("private words", name, number + offset, _around(line, match))


def _defined_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if not node.name.startswith("test_"):  # a sentence
            yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def _prose(text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """(Line, text, whether a docstring opens here) of each docstring and comment."""
    for node in nodes:
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = getattr(statement, "value", None)
            if (
                isinstance(statement, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                yield statement.lineno, value.value, True
    if not PRIVATE.search("\n".join(line for line in text.splitlines() if "#" in line)):
        return  # to tokenize takes longer than all else
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def _pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def _prose_of_page(path: Path) -> Iterator[str]:
    """The page's lines; headings and lines within fences as empty ones."""
    fenced = False
    for line in path.read_text(encoding="utf-8").splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        yield "" if fenced or fence or line.startswith("#") else re.sub(r"`[^`]*`|\"[^\"]*\"", "", line)


def _around(line: str, match: re.Match[str]) -> str:
    return line[max(0, match.start() - 40) : match.end() + 40].strip()


def counts(root: Path, places: list[Place]) -> dict[str, int]:
    """The figures of one checkout. Product: the folders that are installed for use, without bench, tests and
    tools."""
    product = [path for folder in PRODUCT for path in (root / folder).rglob("*.py")]
    found = Counter(place.count for place in places)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    configuration = (root / "docs/configuration.md").read_text(encoding="utf-8")
    zeros = [name for name, target in TARGETS.items() if target == 0]
    return {
        "product files": len(product),
        "product lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in product),
        **{name: found[name] for name in zeros},
        "words of docs": sum(map(_words, (root / "docs").glob("*.md"))),
        "hard dependencies": len(project["dependencies"]),
        "option rows": len(re.findall(r"^\| `--", configuration, re.MULTILINE)),
    }


def _words(page: Path) -> int:
    """Number of words; the bars of tables do not count."""
    return len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))


def by_folder(places: list[Place]) -> dict[str, dict[str, int]]:
    """Findings by count and folder."""
    found = Counter((place.count, place.file.partition("/")[0]) for place in places)
    return {
        name: {folder: n for (count, folder), n in sorted(found.items()) if count == name}
        for name, _ in found
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to count")
    parser.add_argument(
        "--list", nargs="+", metavar=("COUNT", "FOLDER"), help="print the findings of one count"
    )
    parser.add_argument(
        "--request", action="store_true", help="count the files that one streamed chat executes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tighten", action="store_true", help="lower the limits of the test")
    options = parser.parse_args()
    root = options.root.resolve()
    places = list(findings(root))
    if options.list:
        _print_list(places, *options.list)
        return
    figures, folders = counts(root, places), by_folder(places)
    request = _request(root, figures) if options.request else {}
    if options.json:
        print(json.dumps({"counts": figures, "by folder": folders, "files of a request": request}, indent=2))
    else:
        _print_table(figures, folders)
        for process, files in request.items():
            print(f"\n{process}: {len(files)} files\n  " + "\n  ".join(files))
    if options.tighten:
        limits = json.loads(LIMITS.read_text())
        lower = {name: min(limit, figures[name]) for name, limit in limits.items()}
        LIMITS.write_text(json.dumps(lower, indent=2) + "\n")


def _request(root: Path, figures: dict[str, int]) -> dict[str, list[str]]:
    from house_request import files_of_a_request

    files = files_of_a_request(root)
    figures |= {f"files of a request, {process}": len(names) for process, names in files.items()}
    figures["files of a request"] = len({name for names in files.values() for name in names})
    return files


def _print_list(places: list[Place], count: str, *folders: str) -> None:
    for place in places:
        if count in place.count and place.file.startswith(folders or ""):
            print(place)


def _print_table(figures: dict[str, int], folders: dict[str, dict[str, int]]) -> None:
    for name, figure in figures.items():
        target = f"target {TARGETS[name]:,}" if name in TARGETS else ""
        print(f"{name:32}{figure:>8,}  {target}")
        if name in folders:
            print("    " + ", ".join(f"{folder} {number}" for folder, number in folders[name].items()))


if __name__ == "__main__":
    main()
