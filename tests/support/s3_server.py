"""moto's S3 server, to which the variables of the cloud lead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest


@contextmanager
def s3_server(environment: pytest.MonkeyPatch, bucket: str) -> Iterator[Any]:
    """Yields a client of boto3. ``bucket`` is made."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
        "ENDPOINT_URL": f"http://{host}:{port}",
        "EC2_METADATA_DISABLED": "true",
    }.items():
        environment.setenv(f"AWS_{name}", value)
    httpx.post(f"http://{host}:{port}/moto-api/reset")  # all servers of a process have the same buckets
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    yield client
    client.close()
    server.stop()
