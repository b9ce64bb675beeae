"""Every trace format is read as a stream in order of arrival; what is wrong with a row names file, line and
field."""

from __future__ import annotations

import gzip
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import AZURE, MOONCAKE, SERVEGEN, SPLITWISE, trace_of, written

from splitserve.traces.errors import TraceFileError
from splitserve.traces.own_format import header_line, row_line, write_trace
from splitserve.traces.readers import open_trace
from splitserve.traces.request import TraceRequest

HEADER = {"format": "splitserve-trace", "version": 1, "block_size": 16}
ROW = {
    "arrival_s": 0.5,
    "num_prompt_tokens": 40,
    "num_output_tokens": 3,
    "block_hashes": ["a", "0B"],
    "session": "s",
}


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "gzip_by_content"])
def test_azure_arrivals_count_from_the_first_row(tmp_path: Path, name: str) -> None:
    content = gzip.compress(AZURE.encode()) if name == "gzip_by_content" else AZURE
    trace = open_trace(written(tmp_path / name, content))
    assert list(trace) == [
        TraceRequest(0.0, 4808, 10),
        TraceRequest(0.052, 3180, 8),
        TraceRequest(61.52004, 110, 27),
    ]
    assert list(trace) == list(trace)
    assert trace.block_size is None
    assert trace.origin_s == pytest.approx(1700158623.97996, abs=1e-6)


def test_azure_stamps_may_have_an_offset_and_another_column_order(tmp_path: Path) -> None:
    rows = ("5,2024-05-10 00:00:00.009930+00:00,2162", "7,2024-05-10 02:00:01+02:00,2399", "", "")
    text = "\r\n".join(["\ufeffGeneratedTokens,TIMESTAMP,ContextTokens", *rows])
    assert list(open_trace(written(tmp_path / "t.csv", text))) == [
        TraceRequest(0.0, 2162, 5),
        TraceRequest(0.99007, 2399, 7),
    ]


def test_mooncake_keeps_block_hashes(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "t.jsonl.gz", MOONCAKE))
    assert trace.block_size == 512
    assert list(trace) == [
        TraceRequest(0.0, 1100, 5, (0, 1, 2)),
        TraceRequest(0.04, 1030, 9, (0, 1, 3)),
        TraceRequest(3.0, 20, 2, (4,)),
    ]


def test_splitwise_sim_and_servegen(tmp_path: Path) -> None:
    assert list(open_trace(written(tmp_path / "a.csv", SPLITWISE))) == [
        TraceRequest(1.0, 1024, 128),
        TraceRequest(1.05, 512, 64),
    ]
    assert list(open_trace(written(tmp_path / "b.csv", SERVEGEN))) == [
        TraceRequest(0.0, 9, 291),
        TraceRequest(0.0032, 4844, 1441),
    ]
    short = "request_id,arrival_timestamp,prompt_size,token_size\n0,0.456389,1409,82\n"
    assert list(open_trace(written(tmp_path / "c.csv", short))) == [TraceRequest(0.456389, 1409, 82)]


def test_our_own_format(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        [
            {**HEADER, "origin_s": 1.7e9},
            ROW,
            {"arrival_s": 1, "num_prompt_tokens": 1, "num_output_tokens": 1},
        ],
    )
    trace = open_trace(path)
    assert (trace.block_size, trace.origin_s) == (16, 1.7e9)
    assert list(trace) == [TraceRequest(0.5, 40, 3, (10, 11), "s"), TraceRequest(1, 1, 1)]


HASHES = st.lists(st.integers(0, 2**128 - 1), max_size=4).map(tuple)
REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        st.floats(0, 1e9),
        st.integers(64, 1 << 30),
        st.integers(1, 1 << 30),
        HASHES,
        st.text(max_size=20),
    ),
    max_size=20,
).map(lambda requests: sorted(requests, key=lambda request: request.arrival_s))


@given(REQUESTS, st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_what_is_written_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, requests: list[TraceRequest], name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    assert write_trace(path, trace_of(requests, 16)) == len(requests)
    assert list(open_trace(path)) == requests
    first = path.read_bytes()
    write_trace(path, open_trace(path))
    assert path.read_bytes() == first


@given(st.lists(st.floats(0, 1000), max_size=60), st.floats(1e-3, 50), st.randoms(use_true_random=False))
def test_a_log_in_the_order_of_endings_is_put_in_the_order_of_arrivals(
    tmp_path_factory: pytest.TempPathFactory, arrivals: list[float], disorder_s: float, chance: random.Random
) -> None:
    ended = sorted(arrivals, key=lambda arrival: arrival + chance.random() * disorder_s * 0.999)
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.write_bytes(
        header_line(disorder_s=disorder_s)
        + b"".join(row_line(TraceRequest(arrival, 1, 1)) for arrival in ended)
    )
    assert [request.arrival_s for request in open_trace(path)] == sorted(arrivals)


def test_a_row_later_than_the_log_promised_is_an_error(tmp_path: Path) -> None:
    rows = [{**ROW, "arrival_s": arrival} for arrival in (0, 20, 21, 5)]
    with pytest.raises(TraceFileError, match="line 5: arrives 16 s before a row above it"):
        list(open_trace(written(tmp_path / "t.jsonl", [{**HEADER, "disorder_s": 10}, *rows])))


def test_azure_rows_out_of_order_are_refused_or_sorted(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", AZURE + "2023-11-16 18:18:00.0000000,1,2\n")
    with pytest.raises(TraceFileError, match=r"t\.csv, line 5: arrives 5\.5 s before .*--disorder-s"):
        list(open_trace(path))
    sorted_trace = open_trace(path, disorder_s=10)
    assert [request.num_prompt_tokens for request in sorted_trace] == [4808, 3180, 1, 110]
    assert next(iter(sorted_trace)).arrival_s == 10.0


def test_empty_requests_are_refused_or_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", SPLITWISE + "2,2,0,2.0,1,12,0\n3,2,0,3.0,1,8,8\n")
    with pytest.raises(TraceFileError, match="line 4: a request of 0 output tokens"):
        list(open_trace(path))
    assert [request.arrival_s for request in open_trace(path, drop_empty=True)] == [1.0, 1.05, 3.0]


def changed(row: dict[str, object], **changes: object) -> dict[str, object]:
    return {key: value for key, value in {**row, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("content", "line", "field", "message"),
    [
        ("", None, None, "is empty"),
        (SPLITWISE.replace("\n", "\r"), 1, None, "is no CSV: new-line"),
        ("prompt_size,prompt_size\n", 1, None, "names a column twice: 'prompt_size'"),
        ("a,b\n1,2\n", 1, None, "no trace format has these columns: 'a, b'"),
        ([{"a": 1}], 1, None, "no trace format has these keys"),
        ("{oops\n", 1, None, "is no JSON"),
        (AZURE + "yesterday,1,2\n", 5, "TIMESTAMP", "should be a time such as"),
        (
            AZURE + "2023-11-16 18:19:00,1.5,2\n",
            5,
            "ContextTokens",
            "should be a whole number of tokens, not 1.5",
        ),
        (AZURE + "2023-11-16 18:19:00,1,many\n", 5, "GeneratedTokens", "should be a number, not 'many'"),
        (AZURE + "2023-11-16 18:19:00,1\n", 5, None, "should have 3 columns"),
        (AZURE + '2023-11-16 18:19:00,1,"2\n', 5, None, "is no CSV"),
        (SPLITWISE + "2,2,0,nan,1,8,8\n", 4, "arrival_timestamp", "finite"),
        (SPLITWISE + "2,2,0,-1,1,8,8\n", 4, "arrival_timestamp", "at least 0"),
        (SPLITWISE + "2,2,0,3,4,8,8\n", 4, "batch_size", "one sequence"),
        (SPLITWISE + "2,2,0,3,1,99999999999,8\n", 4, "prompt_size", "whole number"),
        (
            [*MOONCAKE, changed(MOONCAKE[0], timestamp=...)],
            4,
            "timestamp",
            "is missing; the row has: input_length",
        ),
        (
            [*MOONCAKE, changed(MOONCAKE[0], timestamp=4000, hash_ids=[1, "2"])],
            4,
            "hash_ids",
            "list of whole numbers",
        ),
        (
            [*MOONCAKE, changed(MOONCAKE[0], timestamp=4000, hash_ids=[1, 2, 3, 4])],
            4,
            "hash_ids",
            "at most 3 blocks of 512",
        ),
        (
            [*MOONCAKE, changed(MOONCAKE[0], timestamp=4000, output_length=True)],
            4,
            "output_length",
            "whole number",
        ),
        ([*MOONCAKE, [1]], 4, None, "should be an object"),
        ([changed(HEADER, version=2)], 1, "version", "only version 1 is known"),
        ([changed(HEADER, blocksize=2)], 1, "blocksize", "is not a key of version 1"),
        ([changed(HEADER, block_size=0)], 1, "block_size", "from 1 to"),
        ([HEADER, changed(ROW, prompt="text")], 2, "prompt", "is not a key of version 1"),
        ([HEADER, changed(ROW, block_hashes=["0x1"])], 2, "block_hashes", "hexadecimal"),
        ([HEADER, changed(ROW, block_hashes=[""])], 2, "block_hashes", "hexadecimal"),
        ([HEADER, changed(ROW, block_hashes=["1" * 33])], 2, "block_hashes", "hexadecimal"),
        ([changed(HEADER, block_size=...), ROW], 2, "block_hashes", "without a block_size"),
        ([HEADER, changed(ROW, session=7)], 2, "session", "should be text"),
        ([HEADER, changed(ROW, arrival_s="soon")], 2, "arrival_s", "number"),
    ],
)
def test_a_bad_row_names_file_line_and_field(
    tmp_path: Path, content: str | list[object], line: int | None, field: str | None, message: str
) -> None:
    path = written(tmp_path / "some_trace", content)
    with pytest.raises(TraceFileError) as caught:
        list(open_trace(path))
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, line, field)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_files_that_are_no_text_missing_or_cut_short(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot be read: No such file"):
        open_trace(tmp_path / "none.csv")
    with pytest.raises(TraceFileError, match="line 1: not UTF-8"):
        open_trace(written(tmp_path / "t.csv", b"TIMESTAMP\xff"))
    long = gzip.compress((AZURE + "2023-11-16 18:19:00,1,2\n" * 20_000).encode())
    with pytest.raises(TraceFileError, match="gzip data is damaged or cut short"):
        list(open_trace(written(tmp_path / "cut", long[: len(long) // 2])))


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    bad = open_trace(written(tmp_path / "bad.csv", AZURE + "yesterday,1,2\n"))
    with pytest.raises(TraceFileError, match="line 5"):
        write_trace(tmp_path / "out.jsonl", bad)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]
    with pytest.raises(TraceFileError, match="cannot be written"):
        write_trace(tmp_path / "no folder" / "out.jsonl", trace_of([]))


def test_reading_takes_the_same_memory_however_long_the_trace(tmp_path: Path) -> None:
    def peak_bytes(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}.jsonl"
        path.write_bytes(
            header_line(16)
            + b"".join(row_line(TraceRequest(at, 64, 3, (at, at + 1))) for at in range(num_rows))
        )
        tracemalloc.start()
        for _ in open_trace(path):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(100)  # what is imported and cached once
    assert (
        peak_bytes(20_000) < 300_000
    )  # Python's own store of spare tuples is a third of this; the rows would be 6 MB


def test_a_link_or_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        write_trace(path, trace_of([TraceRequest(0.0, 3, 4)]))
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert os.read(reader, 1000) == target.read_bytes() != b""
    os.close(reader)
