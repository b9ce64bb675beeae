"""The table of tried formats: only tests that passed, and every family is in it."""

from __future__ import annotations

from pathlib import Path

from support.families import FAMILIES
from tried import COLUMNS, table, tried_in

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CASE = (
    '<testcase name="a"><properties><property name="tried" value="{tried}"/></properties>{outcome}</testcase>'
)


def test_only_what_passed_is_in_the_table(tmp_path: Path) -> None:
    cases = [
        CASE.format(tried="llama3|at load|int8", outcome=""),
        CASE.format(tried="llama3|at load|int4", outcome=""),
        CASE.format(tried="llama3|gguf|Q4_K", outcome="<failure/>"),
        CASE.format(tried="gemma2|gpu|AWQ", outcome="<skipped/>"),
        '<testcase name="e"/>',
    ]
    report = tmp_path / "tried.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = tried_in(report)
    assert found == {
        "llama3": {column: ["int4", "int8"] if column == "at load" else [] for column in COLUMNS}
    }
    assert table(found).splitlines()[-1] == (
        "| llama3 | not tried | int4, int8 | not tried | not tried | not tried |"
    )


def test_every_family_is_in_the_record() -> None:
    rows = (RESULTS / "tried.md").read_text().splitlines()
    assert {row.split("|")[1].strip() for row in rows if row.startswith("|")} >= set(FAMILIES)
