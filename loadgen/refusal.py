"""The sentence for a server's refusal."""

from __future__ import annotations

import orjson


def error_sentence(status: int, body: bytes) -> str:
    """The server's own message if it sent one."""
    hint = " (here: --api-key-file FILE)" if status == 401 else ""
    try:
        return f"the server answered {status}: {orjson.loads(body)['error']['message']}{hint}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return f"the server answered {status}: {body[:200].decode(errors='replace')}"
