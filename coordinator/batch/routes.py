"""/v1/files and /v1/batches, as OpenAI's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive

from ..errors import BodyTooLarge, InvalidRequest, NotFound, Overloaded, WrongField
from ..generate.bodies.fields import Body, Metadata, UnknownFields
from ..http.answers import account_of, json_response, limit_of, page_of, page_response
from ..http.body import held_body
from ..http.overload import Overload
from ..tenants.limits import Account
from ..validation import validated
from .files import PART_BYTES, StoredFile
from .lines import Used
from .runner import BatchRunner
from .store import ENDING, BatchStore, StoredBatch

MAX_FILE_BYTES = 200 << 20
FORM_BYTES = 1 << 20
"""Bytes of a form beside its file."""
MAX_BODY_BYTES = 1 << 20
MAX_UPLOADS = 8
"""Files that a tenant may be uploading at a time, to one process: each lies in TMPDIR until it is whole."""
WINDOW_S = 24 * 3600
PAGE, MAX_PAGE = 20, 100
MAX_FILES_PAGE = 10_000
TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip


class BatchRequest(Body):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"
    ]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchRoutes:
    """Everybody sees their own tenant's."""

    def __init__(self, runner: BatchRunner, overload: Overload) -> None:
        self._runner, self._overload = runner, overload
        self._uploading: Counter[str] = Counter()  # by tenant
        self._unknown = UnknownFields()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._list_files, methods=["GET"]),
            Route("/v1/files/{id}", self._file, methods=["GET"]),
            Route("/v1/files/{id}", self._delete_file, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self._content, methods=["GET"]),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list_batches, methods=["GET"]),
            Route("/v1/batches/{id}", self._batch, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _upload(self, request: Request) -> Response:
        announced, account = request.headers.get("content-length", ""), account_of(request)
        if announced.isdigit() and int(announced) > MAX_FILE_BYTES + FORM_BYTES:
            raise BodyTooLarge(MAX_FILE_BYTES)
        if self._uploading[account.tenant] >= MAX_UPLOADS:
            message = f"{MAX_UPLOADS} files of this tenant are being uploaded; send this one after them."
            raise Overloaded(message, retry_after_s=1)
        self._uploading[account.tenant] += 1
        try:
            async with Request(request.scope, _bounded(request.receive)).form(
                max_files=1, max_fields=10
            ) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise WrongField("file", "must be a file of a multipart/form-data body")
                if purpose != "batch":
                    raise WrongField("purpose", "must be 'batch' on this server")
                return await self._answered(request, _file(await self._store(file, account)))
        except HTTPException as error:
            raise InvalidRequest(f"The body must be multipart/form-data: {error.detail}") from error
        finally:
            self._uploading[account.tenant] -= 1

    async def _store(self, file: UploadFile, account: Account) -> StoredFile:
        """Raises BodyTooLarge or StorageLimitReached."""
        if (file.size or 0) > MAX_FILE_BYTES:
            raise BodyTooLarge(MAX_FILE_BYTES)
        tenant, most, name = account.tenant, account.max_stored_bytes, (file.filename or "file")[:255]
        id = await self._runner.call(lambda store: store.begin_file(tenant, name, time.time(), most))
        try:
            while part := await file.read(PART_BYTES):
                await self._runner.call(
                    partial(BatchStore.add_part, tenant=tenant, id=id, content=part, max_bytes=most)
                )
            return await self._runner.call(lambda store: store.end_file(tenant, id, "batch"))
        except BaseException:
            await self._delete(tenant, id)
            raise

    async def _delete(self, tenant: str, id: str) -> None:
        """Delete a file, part by part; what a process that ends leaves is pruned."""
        await self._runner.call(lambda store: store.hide_file(tenant, id))
        while await self._runner.call(lambda store: store.drop_part(id)):
            pass

    async def _answered(self, request: Request, value: Any) -> Response:
        """Return a JSON answer, with what the tenant may yet store."""
        account, answer = account_of(request), json_response(value)
        if (most := account.max_stored_bytes) is not None:
            stored = await self._runner.call(lambda store: store.stored(account.tenant))
            answer.headers["x-ratelimit-limit-stored-bytes"] = str(most)
            answer.headers["x-ratelimit-remaining-stored-bytes"] = str(max(0, most - stored))
        return answer

    async def _list_files(self, request: Request) -> Response:
        query, tenant = request.query_params, account_of(request).tenant
        limit, newest = limit_of(request, MAX_FILES_PAGE, MAX_FILES_PAGE), query.get("order", "desc") != "asc"
        found = await self._runner.call(
            lambda store: store.files(
                tenant, query.get("purpose"), query.get("after"), limit, newest_first=newest
            )
        )
        page = page_of([_file(file) for file in found[:limit]], more=len(found) > limit)
        return await self._answered(request, page)

    async def _file(self, request: Request) -> Response:
        return json_response(_file(await self._found_file(request)))

    async def _content(self, request: Request) -> Response:
        file, tenant = await self._found_file(request), account_of(request).tenant
        part = partial(BatchStore.content, tenant=tenant, id=file.id)
        first = await self._runner.call(part)

        async def parts() -> AsyncIterator[bytes]:
            at, content = 0, first
            while content:
                at += len(content)
                yield content  # as the client reads
                content = await self._runner.call(partial(part, at=at)) if at < file.num_bytes else b""

        length = str(file.num_bytes)
        return StreamingResponse(parts(), 200, {"content-length": length}, "application/octet-stream")

    async def _delete_file(self, request: Request) -> Response:
        file, tenant = await self._found_file(request), account_of(request).tenant
        await self._delete(tenant, file.id)
        return await self._answered(request, {"id": file.id, "object": "file", "deleted": True})

    async def _create(self, request: Request) -> Response:
        async with held_body(
            dict(request.scope["headers"]), request.receive, MAX_BODY_BYTES, self._overload
        ) as body:
            asked = validated(BatchRequest, body)
        self._unknown.note(asked.unknown_fields())
        account, now = account_of(request), time.time()
        if await self._runner.call(lambda store: store.file(account.tenant, asked.input_file_id)) is None:
            raise NotFound(f"There is no file {asked.input_file_id!r}.", param="input_file_id")
        known = asked.model_dump(include=set(BatchRequest.model_fields))
        details = {**known, "created_at": int(now), "expires_at": int(now) + WINDOW_S}
        most = account.max_stored_bytes
        batch = await self._runner.call(
            lambda store: store.add_batch(account.tenant, account.key_id, details, now, most)
        )
        answer = await self._runner.call(lambda store: _batch(store, batch))
        self._runner.wake()
        return json_response(answer)

    async def _list_batches(self, request: Request) -> Response:
        tenant, after = account_of(request).tenant, request.query_params.get("after")
        limit = limit_of(request, PAGE, MAX_PAGE)
        found = await self._runner.call(lambda store: store.batches(tenant, after, limit))
        page = [await self._runner.call(partial(_batch, batch=batch)) for batch in found[:limit]]
        return page_response(page, more=len(found) > limit)

    async def _batch(self, request: Request) -> Response:
        return json_response(await self._found_batch(request))

    async def _cancel(self, request: Request) -> Response:
        found = await self._found_batch(request)
        id, now = found["id"], int(time.time())
        changed = await self._runner.call(
            lambda store: store.change(
                id, "cancelling", {"cancelling_at": now}, ("validating", "in_progress")
            )
        )
        if changed is None and found["status"] not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"The batch is {found['status']} and cannot be cancelled any more.")
        self._runner.wake()
        return json_response(await self._found_batch(request))

    async def _found_file(self, request: Request) -> StoredFile:
        id, tenant = request.path_params["id"], account_of(request).tenant
        file = await self._runner.call(lambda store: store.file(tenant, id))
        if file is None:
            raise NotFound(f"There is no file {id!r}.", param="file_id")
        return file

    async def _found_batch(self, request: Request) -> dict[str, Any]:
        id, tenant = request.path_params["id"], account_of(request).tenant
        batch = await self._runner.call(lambda store: store.batch(tenant, id))
        if batch is None:
            raise NotFound(f"There is no batch {id!r}.", param="batch_id")
        return await self._runner.call(lambda store: _batch(store, batch))


def _bounded(receive: Receive) -> Receive:
    """The same, which raises BodyTooLarge once more than a file and its form have come: the form lies on disk
    until it is whole."""
    num_bytes = 0

    async def receive_bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_FILE_BYTES + FORM_BYTES:
            raise BodyTooLarge(MAX_FILE_BYTES)
        return message

    return receive_bounded


def _file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _batch(store: BatchStore, batch: StoredBatch) -> dict[str, Any]:
    """OpenAI's object, as things stand."""
    empty: dict[str, Any] = dict.fromkeys((*TIMES, "output_file_id", "error_file_id", "errors"))
    counts, used = store.counts(batch.id)._asdict(), _usage(store.used(batch.id))
    details = {name: value for name, value in batch.details.items() if name not in ENDING}
    return {
        **empty,
        **details,
        "id": batch.id,
        "object": "batch",
        "status": batch.status,
        "request_counts": counts,
        "usage": used,
    }


def _usage(used: Used) -> dict[str, Any]:
    """Return the usage of the answered requests, with the names of OpenAI's batches."""
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": used.completion,
        "output_tokens_details": {"reasoning_tokens": used.reasoning},
        "total_tokens": used.prompt + used.completion,
    }
