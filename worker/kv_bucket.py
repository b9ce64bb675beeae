"""Blobs of the KV store as objects of S3, Google Cloud Storage or Azure Blob Storage. Needs
``splitserve[object-store]``.

    s3://BUCKET/PREFIX   gs://BUCKET/PREFIX   az://CONTAINER/PREFIX

Credentials, region and endpoint come from the environment (``VARIABLES``), or from the machine's or pod's
identity. A request takes tens of milliseconds, whatever its size: so each block is an object, and many are
read at a time. Nothing is removed because of its age: that is for the bucket's lifecycle rules.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from ..engine.errors import KVStoreError
from .kv_store import MAX_KNOWN
from .threads import Threads

TIMEOUT = timedelta(seconds=10)  # no prompt waits longer
CONNECT_TIMEOUT = timedelta(seconds=2)
MAX_RETRIES = 2
VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY and AZURE_STORAGE_ENDPOINT",
}
Result = TypeVar("Result")


class KVBucket:
    """See ``kv_store.Storage``. Requests run in a loop of its own, where ``close`` can end them: a thread
    that still waited within the library at the process's end would abort it."""

    num_readers = ahead = 32
    num_writers = 16
    group_bytes = 0  # one block
    max_known = MAX_KNOWN

    def __init__(self, url: str) -> None:
        """Raises KVStoreError, or ModuleNotFoundError without the extra."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
        from obstore.store import from_url

        self._url, self._refusals = url.rstrip("/"), (PermissionDeniedError, UnauthenticatedError)
        kind = url.partition("://")[0]
        self._variables = VARIABLES[kind]
        try:
            self._store = from_url(
                url,
                config={"disable_bulk_delete": True} if kind == "s3" else None,  # not every server has it
                client_options={"timeout": TIMEOUT, "connect_timeout": CONNECT_TIMEOUT, "allow_http": True},
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": TIMEOUT},
            )
        except Exception as error:
            raise KVStoreError(f"--kv-store {url}: {_reason(error)}; check {self._variables}") from None

        self._loop, self._thread, self._closed = asyncio.new_event_loop(), Threads(1), False
        self._thread.submit(self._loop.run_forever)

    def __str__(self) -> str:
        return self._url

    def open(self, folder: str) -> None:
        """Write, look for and remove an object, as is done later. It has a name of its own: of workers that
        start together one would find it removed by another, or be refused for writing it again too soon."""
        name = f"{folder}/opened-{secrets.token_hex(8)}"
        requests: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "write": lambda: self._put(name, b""),
            "read and list": lambda: self._get(f"{folder}/none", 0),
            "remove": lambda: self._remove(name),
        }
        for verb, request in requests.items():
            try:
                self._waited(request())
            except FileNotFoundError:
                problem = "there is no such bucket: create it, or check its name"
            except self._refusals as error:
                problem = f"the credentials may not {verb} objects there ({_reason(error)}): check them"
            except Exception as error:  # of several libraries below it
                problem = f"cannot {verb} objects there ({_reason(error)}): check the network"
            else:
                continue
            self.close()
            raise KVStoreError(f"--kv-store {self._url}: {problem}, and {self._variables}") from None

    def trim(self) -> None:
        """Nothing: see above."""

    def get(self, name: str, num_bytes: int) -> bytes | None:
        return self._result(self._get(name, num_bytes))

    def touch(self, name: str) -> bool:
        return self._result(self._is_there(name))

    def put(self, name: str, blob: bytes) -> None:
        self._result(self._put(name, blob))

    def remove(self, name: str) -> None:
        self._result(self._remove(name))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.stop()
        self._thread.join()
        if not self._loop.is_running():
            self._loop.close()

    def _result(self, request: Coroutine[Any, Any, Result]) -> Result:
        """Raises OSError."""
        try:
            return self._waited(request)
        except Exception as error:  # of several libraries below it
            raise OSError(errno.EIO, _reason(error)) from None

    def _waited(self, request: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            request.close()
            raise OSError("closed")
        return asyncio.run_coroutine_threadsafe(request, self._loop).result()

    # --- in the loop -----------------------------------------------------------------------------

    async def _get(self, name: str, num_bytes: int) -> bytes | None:
        try:
            found = await self._store.get_async(name)
        except FileNotFoundError:
            return None
        if found.meta["size"] != num_bytes:  # it may be too large to hold
            return b""
        return bytes(await found.bytes_async())

    async def _is_there(self, name: str) -> bool:
        try:
            await self._store.head_async(name)
        except FileNotFoundError:
            return False
        return True

    async def _put(self, name: str, blob: bytes) -> None:
        await self._store.put_async(name, blob, use_multipart=False)

    async def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # another worker has removed it, or this is a second try
            await self._store.delete_async(name)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]
