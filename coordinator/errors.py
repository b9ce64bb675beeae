"""Errors as clients see them, in OpenAI's shape; and ``CannotStart``, where no client ever will.

    ApiError                     status, message, param, code, Retry-After
    ├── InvalidRequest           400
    │   ├── WrongField           400, param
    │   │   └── ImagesWanted     400 where nothing fetches them
    │   └── ContextTooLong       400, code context_length_exceeded
    ├── Unauthorized             401
    ├── Forbidden                403
    ├── NotFound                 404
    ├── MethodNotAllowed         405
    ├── RequestTimeout           408
    ├── AnswerDiffers            409
    ├── BodyTooLarge             413
    ├── UnsupportedMediaType     415
    ├── HeadersTooLarge          431
    ├── Overloaded               429, Retry-After
    ├── RateLimited              429, Retry-After, x-ratelimit-*
    ├── Unavailable              503, Retry-After
    ├── DeadlineExceeded         504
    ├── StorageFull              507, Retry-After
    └── InternalError            500

Lower layers are mapped in two places: ``from_ended`` for the lifecycle, ``validation.py`` for pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson

from .lifecycle.request import Ended, ErrorKind

Headers = list[tuple[bytes, bytes]]
RETRY_AFTER_S = 1.0
MUST_BE_DATA = "must be a data: URL (data:image/png;base64,...)"
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status, as Anthropic's clients know them."""


class CannotStart(Exception):
    """The coordinator cannot serve with these settings. The message names the reason and the remedy."""


class ApiError(Exception):
    """An answer that is not 200. ``param`` is the path of the field that is at fault."""

    status: int = 500
    kind: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)

    def body(self) -> bytes:
        """The JSON body."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def body_for(self, path: str) -> bytes:
        """The JSON body that clients of this path know: Anthropic's shape below /v1/messages, Ollama's below
        /api."""
        if path.startswith("/api/"):
            return orjson.dumps({"error": self.message})
        if not path.startswith("/v1/messages"):
            return self.body()
        error = {
            "type": ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else self.kind),
            "message": self.message,
        }
        return orjson.dumps({"type": "error", "error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers beside content type and length."""
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode())]


def _unpickled(kind: type[ApiError], args: tuple[Any, ...], state: dict[str, Any]) -> ApiError:
    """Past ``__init__``, whose parameters differ."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidRequest(ApiError):
    status, kind = 400, "invalid_request_error"


class WrongField(InvalidRequest):
    """A field, parameter or header is at fault, by whose name the message begins."""

    def __init__(self, param: str, fault: object) -> None:
        super().__init__(f"{param}: {fault}", param=param)


class ImagesWanted(WrongField):
    """A request needs images that are still to be fetched."""

    def __init__(self, wanted: Sequence[tuple[str, str]]) -> None:
        """``wanted``: paths of parts, with the addresses they name; not empty."""
        super().__init__(wanted[0][0], f"{MUST_BE_DATA} here: images are fetched for answers alone")
        self.wanted, self.timeout_s = wanted, math.inf  # seconds that the request may take


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, exceed the model's context. Clients look for this
    wording."""

    code = "context_length_exceeded"

    def __init__(
        self,
        max_model_len: int,
        num_prompt_tokens: int,
        max_tokens: int | None,
        *,
        param: str,
        at_least: bool = False,
    ) -> None:
        asked = f"your prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens"
        advice = "Shorten the prompt"
        if max_tokens is not None:
            total = num_prompt_tokens + max_tokens
            asked = (
                f"you requested {total} tokens ({num_prompt_tokens} in the prompt, {max_tokens} for "
                "the completion)"
            )
            advice += " or ask for fewer tokens"
        message = f"This model's maximum context length is {max_model_len} tokens, but {asked}. {advice}."
        super().__init__(message, param=param)


class Unauthorized(ApiError):
    status, kind, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(ApiError):
    status, kind, code = 403, "permission_error", "forbidden"


class NotFound(ApiError):
    status, kind = 404, "invalid_request_error"


class MethodNotAllowed(ApiError):
    status, kind = 405, "invalid_request_error"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message, code="method_not_allowed")
        self.allow = allow

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"allow", self.allow.encode())]


class RequestTimeout(ApiError):
    """The client began a request and did not send all of it."""

    status, kind, code = 408, "invalid_request_error", "request_timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"The request was not complete after {timeout_s:g} s (larger ones have longer); send "
            "it faster or in parts."
        )


class AnswerDiffers(ApiError):
    status, kind, code = 409, "invalid_request_error", "answer_differs"

    def __init__(self) -> None:
        super().__init__("This answer is another than that of Last-Event-ID: ask again without this header.")


class HeadersTooLarge(ApiError):
    status, kind = 431, "invalid_request_error"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"The headers have more than {max_bytes} bytes; send fewer or shorter ones.")


class BodyTooLarge(ApiError):
    status, kind, code = 413, "invalid_request_error", "request_too_large"

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(f"The body is larger than {max_body_bytes} bytes, the most this server accepts.")


class UnsupportedMediaType(ApiError):
    status, kind, code = 415, "invalid_request_error", "unsupported_media_type"


class Overloaded(ApiError):
    status, kind, code = 429, "rate_limit_error", "overloaded"


class RateLimited(ApiError):
    """A limit of the client's key or tenant is reached. ``what``: its name; ``more``: rate limit headers."""

    status, kind = 429, "rate_limit_error"

    def __init__(
        self, message: str, code: str, what: str, more: list[tuple[bytes, bytes]], retry_after_s: float | None
    ) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.what, self._more = what, more
        if code == "insufficient_quota":
            self.kind = "insufficient_quota"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), *self._more]


class Unavailable(ApiError):
    status, kind, code = 503, "service_unavailable_error", "unavailable"


class DeadlineExceeded(ApiError):
    status, kind, code = 504, "timeout_error", "deadline_exceeded"


class InternalError(ApiError):
    code = "internal_error"


def no_workers(gap: str) -> Unavailable:
    """Return the error while no pair of workers is connected; ``gap``: the missing role, as a sentence."""
    message = (
        f"{gap[0].upper()}{gap[1:]}. Service resumes by itself when there is one of each role that fit "
        "together."
    )
    return Unavailable(message, retry_after_s=RETRY_AFTER_S)


def on_route(route: str, model: str, error: ApiError) -> ApiError:
    """Return the error of a route whose models can take nothing; ``error``: that of the first of them."""
    what = "which has no workers" if isinstance(error, Unavailable) else "whose queue is full"
    message = f"model {route!r} routes to {model!r}, {what}: {error.message}"
    return type(error)(message, code=error.code, retry_after_s=error.retry_after_s)


class StorageFull(ApiError):
    """The disk that a file would go to has no space."""

    status, code = 507, "insufficient_storage"

    def __init__(self, where: object) -> None:
        message = (
            f"There is no space on the disk for {where}: nothing was stored. Free some there, then "
            "send the request again."
        )
        super().__init__(message, retry_after_s=30)


def from_ended(ended: Ended) -> ApiError:
    """The lifecycle's refusal or failure as an answer."""
    kind: ErrorKind | None = ended.error
    assert kind is not None
    retry_after_s = ended.retry_after_s if ended.retry_after_s is not None else RETRY_AFTER_S
    match kind:
        case "overloaded":
            return Overloaded(ended.message or "The server is overloaded.", retry_after_s=retry_after_s)
        case "unavailable":
            return Unavailable(ended.message or "No worker is available.", retry_after_s=retry_after_s)
        case "deadline":
            return DeadlineExceeded(ended.message or "The request did not finish before its deadline.")
        case "refused":
            return InvalidRequest(ended.message or "The request was refused.")
        case "failed":
            return InternalError(ended.message or "The request failed.")
