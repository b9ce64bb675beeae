"""Small trace files in every format, for tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from splitserve.traces.request import Trace, TraceRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:05.5000000,110,27
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 40, "input_length": 1030, "output_length": 9, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 20, "output_length": 2, "hash_ids": [4]},
]
SPLITWISE = """request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,1.0,1,1024,128
1,2,0,1.05,1,512,64
"""
SERVEGEN = (
    "arrival_timestamp,input_tokens,output_tokens,reason_ratio\n0.0,9,291,0.332\n0.0032,4844,1441,0.416\n"
)


def written(path: Path, content: str | bytes | Iterable[object]) -> Path:
    """``path`` with text, bytes, or rows as JSON lines; gzip'ed if its name ends in ``.gz``."""
    if not isinstance(content, (str, bytes)):
        content = "".join(json.dumps(row) + "\n" for row in content)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def trace_of(requests: Iterable[TraceRequest], block_size: int | None = None, origin_s: float = 0.0) -> Trace:
    """A trace that lies in memory."""
    kept = list(requests)
    return Trace("test", lambda: iter(kept), block_size, origin_s)
