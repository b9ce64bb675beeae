"""The lines of a batch's files, as OpenAI's: what is asked, and what was answered. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

MAX_LINES = 50_000
MAX_ERRORS = 20
MAX_LINE_BYTES = 32 << 20


class Line(NamedTuple):
    """One request of a batch; ``number`` counts from 1."""

    number: int
    custom_id: str
    body: bytes


class Used(NamedTuple):
    """Tokens of an answer, or of many."""

    prompt: int = 0
    cached: int = 0  # of the prompt's
    completion: int = 0
    reasoning: int = 0  # of the completion's


class LineError(NamedTuple):
    """Why a batch cannot be taken."""

    number: int | None
    message: str
    code: str = "invalid_request"

    def as_dict(self) -> dict[str, Any]:
        """Return it as an entry of a batch's ``errors``."""
        return {"code": self.code, "line": self.number, "message": self.message, "param": None}


class LineReader:
    """Reads a file part by part. ``errors``: what is wrong with some of its lines, so far."""

    def __init__(self, endpoint: str) -> None:
        self.errors: list[LineError] = []
        self._endpoint = endpoint
        self._rest = b""  # a line that is not whole yet
        self._num_rows = self._num_lines = 0
        self._seen: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether more parts change nothing."""
        too_much = self._num_lines > MAX_LINES or len(self._rest) > MAX_LINE_BYTES
        return too_much or len(self.errors) >= MAX_ERRORS

    def feed(self, part: bytes) -> list[Line]:
        """Return the requests of the next part; an empty one is the end of the file."""
        content = self._rest + part
        end = content.rfind(b"\n") + 1 if part else len(content)
        self._rest = content[end:]
        lines = list[Line]()
        for raw in content[:end].splitlines():
            self._num_rows += 1
            if not raw.strip() or self.done:
                continue
            try:
                lines.append(_line(self._num_rows, raw, self._endpoint, self._seen))
            except (ValueError, TypeError) as error:  # TypeError: nested too deeply to be stored
                self.errors.append(LineError(self._num_rows, str(error)))
        self._num_lines += len(lines)
        if not part and not self._num_lines and not self.errors:
            self.errors.append(LineError(None, "the file holds no request", "empty_file"))
        if len(self._rest) > MAX_LINE_BYTES:
            message = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
            self.errors.append(LineError(self._num_rows + 1, message))
        if self._num_lines > MAX_LINES:
            message = f"the file holds more than {MAX_LINES} requests"
            self.errors.append(LineError(None, message, "too_many_requests"))
        return lines


def _line(number: int, raw: bytes, endpoint: str, seen: set[str]) -> Line:
    """Raises ValueError."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the line is not valid JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise ValueError('a line must be an object with custom_id, method, url and an object "body"')
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        raise ValueError("custom_id must be a string of 1 to 512 characters")
    if custom_id in seen:
        raise ValueError(f"custom_id {custom_id[:80]!r} is used twice")
    seen.add(custom_id)
    if value.get("method") != "POST" or value.get("url") != endpoint:
        raise ValueError(f'method must be "POST" and url the batch\'s endpoint, "{endpoint}"')
    for field in ("stream", "background"):
        if value["body"].get(field):
            raise ValueError(f"{field}: a batch's answers are not streamed, but in its output file")
    return Line(number, custom_id, orjson.dumps(value["body"]))


def used_by(status: int, body: bytes) -> Used:
    """Return the usage in an answer of any endpoint: nothing for an error."""
    if status != 200:
        return Used()
    usage = orjson.loads(body)["usage"]
    if "prompt_tokens" in usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        made = usage.get("completion_tokens_details", {"reasoning_tokens": 0})  # embeddings have none
        return Used(
            usage["prompt_tokens"], cached, usage.get("completion_tokens", 0), made["reasoning_tokens"]
        )
    sent, made, details = usage["input_tokens"], usage["output_tokens"], usage["output_tokens_details"]
    if (cached := usage.get("cache_read_input_tokens")) is not None:  # /v1/messages counts them apart
        return Used(sent + cached, cached, made, details["thinking_tokens"])
    return Used(sent, usage["input_tokens_details"]["cached_tokens"], made, details["reasoning_tokens"])


def output_line(batch_id: str, line: Line, status: int, body: bytes, request_id: str) -> bytes:
    """One line of the output file, or of the error file."""
    response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    return _output(batch_id, line, response, None)


def unanswered_line(batch_id: str, line: Line, code: str, message: str) -> bytes:
    """One line of the error file, for a request that was never answered."""
    return _output(batch_id, line, None, {"code": code, "message": message})


def _output(batch_id: str, line: Line, response: Any, error: Any) -> bytes:
    id = f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"
    return orjson.dumps({"id": id, "custom_id": line.custom_id, "response": response, "error": error})
