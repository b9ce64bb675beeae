"""Blobs of the KV store as objects of S3, Google Cloud Storage or Azure Blob Storage. Needs
``splitserve[object-store]``.

    s3://BUCKET/PREFIX   gs://BUCKET/PREFIX   az://CONTAINER/PREFIX

Credentials, region and endpoint come from the environment (``VARIABLES``), or from the machine's or pod's
identity. A request takes tens of milliseconds, whatever its size: so each block is an object, and many are
read at a time. Nothing is removed because of its age: that is for the bucket's lifecycle rules.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

from ..engine.errors import KVStoreError

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
    """See ``kv_store.Storage``."""

    num_readers = ahead = 32
    num_writers = 16
    group_bytes = 0  # one block

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

    def __str__(self) -> str:
        return self._url

    def open(self, folder: str) -> None:
        """Write, look for and remove an object, as is done later."""
        name, store = f"{folder}/opened", self._store
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: store.put(name, b"", use_multipart=False),
            "read and list": lambda: self._get(f"{folder}/none", 0),
            "remove": lambda: store.delete(name),
        }
        for verb, call in calls.items():
            try:
                call()
            except FileNotFoundError:
                problem = "there is no such bucket: create it, or check its name"
            except self._refusals as error:
                problem = f"the credentials may not {verb} objects there ({_reason(error)}): check them"
            except Exception as error:  # of several libraries below it
                problem = f"cannot {verb} objects there ({_reason(error)}): check the network"
            else:
                continue
            raise KVStoreError(f"--kv-store {self._url}: {problem}, and {self._variables}") from None

    def trim(self) -> None:
        """Nothing: see above."""

    def get(self, name: str, num_bytes: int) -> bytes | None:
        return _called(partial(self._get, name, num_bytes))

    def _get(self, name: str, num_bytes: int) -> bytes | None:
        try:
            found = self._store.get(name)
        except FileNotFoundError:
            return None
        return bytes(found.bytes()) if found.meta["size"] == num_bytes else b""  # it may be too large to hold

    def touch(self, name: str) -> bool:
        try:
            _called(partial(self._store.head, name))
        except FileNotFoundError:
            return False
        return True

    def put(self, name: str, blob: bytes) -> None:
        _called(partial(self._store.put, name, blob, use_multipart=False))

    def remove(self, name: str) -> None:
        _called(partial(self._store.delete, name))


def _called(call: Callable[[], Result]) -> Result:
    """Return what it does. Raises OSError."""
    try:
        return call()
    except FileNotFoundError:
        raise
    except Exception as error:  # of several libraries below it
        raise OSError(errno.EIO, _reason(error)) from None


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]
