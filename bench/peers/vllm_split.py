"""The peer of our comparisons, split as we are: two vLLM servers, one a core, KV blocks over NIXL, and a
proxy in front of them.

    python -m splitserve.bench.peers.vllm_split --vllm /path/to/venv/bin/vllm --model /tmp/llama-125m \\
        --dtype bfloat16 --port 8805
    # in another terminal
    python -m splitserve.bench.peers.peer --url http://127.0.0.1:8805 --name "vLLM split" --json theirs.json

Needs vLLM's CPU build, with ``nixl`` (and ``nixl-cu12``: UCX is in it) in its own environment. The proxy does
what vLLM's documentation asks of one: the prompt goes to the first server with ``max_tokens=1`` and
``do_remote_decode``; its answer about its blocks goes with the prompt to the second server, whose stream is
the client's. The client's first token is thus the *second* server's: the first server's is thrown away.
Ctrl-C or SIGTERM ends all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..environment import option_parser
from ..live_cluster import await_up, words

START_S = 600.0
SIDE_CHANNEL_PORT = 5600  # of NIXL's handshakes; the second server takes the next
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def command(arguments: argparse.Namespace, role: str, port: int) -> list[str]:
    """A server; ``role``: kv_producer or kv_consumer."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    options = words(
        served_model_name="m",
        dtype=arguments.dtype,
        port=port,
        max_model_len=4096,
        max_num_seqs=64,
        no_enable_prefix_caching=True,
        kv_transfer_config=json.dumps(transfer),
    )
    return [str(arguments.vllm), "serve", str(arguments.model), *options]


@contextlib.contextmanager
def servers(arguments: argparse.Namespace, ports: list[int]) -> Iterator[None]:
    """One on each of the first two cores, until the end."""
    processes = []
    try:
        for core, (role, port) in enumerate(zip(("kv_producer", "kv_consumer"), ports, strict=True)):
            environment = {
                **os.environ,
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT + core),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            environment.pop("OMP_NUM_THREADS", None)
            processes.append(
                subprocess.Popen(
                    ["taskset", "-c", str(core), *command(arguments, role, port)], env=environment
                )
            )
        for process, port in zip(processes, ports, strict=True):
            await_up(f"http://127.0.0.1:{port}/health", process, within_s=START_S)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


class Proxy:
    """Prefill there, decode here."""

    def __init__(self, prefill: int, decode: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._prefill, self._decode = (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits)
            for port in (prefill, decode)
        )

    async def models(self, _: Request) -> Response:
        """So that a client learns the model's name."""
        answer = await self._decode.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def complete(self, request: Request) -> Response:
        """A completion, streamed or not."""
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        first.pop("stream_options", None)
        first.pop("min_tokens", None)
        answer = await self._prefill.post("/v1/completions", json=first, headers=headers)
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code, media_type="application/json")
        second = {**body, "kv_transfer_params": answer.json()["kv_transfer_params"]}
        return StreamingResponse(
            self._relay(second, headers),
            media_type="text/event-stream" if body.get("stream") else "application/json",
        )

    async def _relay(self, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
        async with self._decode.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            async for part in answer.aiter_raw():
                yield part


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="the vllm command of its environment")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, default=8805, help="of the proxy; the servers take the next two")
    arguments = parser.parse_args()
    ports = [arguments.port + 1, arguments.port + 2]
    # uvicorn raises it again when it has shut down: the servers end too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with servers(arguments, ports):
        proxy = Proxy(*ports)
        routes = [
            Route("/v1/models", proxy.models),
            Route("/v1/completions", proxy.complete, methods=["POST"]),
        ]
        print(f"vLLM split behind http://127.0.0.1:{arguments.port}", file=sys.stderr, flush=True)
        server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), port=arguments.port, log_level="warning")
        )
        asyncio.run(server.serve())


if __name__ == "__main__":
    main()
