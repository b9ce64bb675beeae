"""Load generator: sends requests to any OpenAI-compatible server and notes when each token arrives.

It needs nothing but ``POST /v1/completions`` with streaming, so that other servers are measured by the same
client.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import orjson
from rich.progress import Progress

from ..traces.console import result_console
from .refusal import error_sentence
from .report import Report, Sample, draw_plot, print_report, summarize, write_json
from .settings import LoadSettings
from .workload import LoadRequest, draw_requests, planned_requests

INTERRUPTED = 130  # exit status after Ctrl-C
WARMUP_SEED = 0x5EED  # warm-up prompts differ from the measured ones


class LoadError(Exception):
    """The load could not be generated; the message names the reason."""


def main(settings: LoadSettings, key: str = "", tls: ssl.SSLContext | None = None) -> int:
    """Run ``splitserve bench`` and print the report. Return the exit status: 1 if any request failed, 130
    after Ctrl-C, where the report is of the requests that have ended.

    ``key``: the API key, if the server needs one; ``tls``: which certificates to trust; None: the system's.
    """
    console, samples, status = result_console(), list[Sample](), 0
    requests = planned_requests(settings)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("requests", total=len(requests))

            def ended(sample: Sample) -> None:
                samples.append(sample)
                progress.advance(task)

            asyncio.run(_interruptible(generate_load(settings, ended, requests, key, tls)))
    except LoadError as error:
        print(f"splitserve: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        status = INTERRUPTED
        message = f"cut short: {len(samples):,} of {len(requests):,} requests had ended"
        print(f"splitserve: {message}", file=sys.stderr)
        if not samples:
            return status
    samples.sort(key=lambda sample: sample.start)
    report: Report = summarize(samples, max(sample.end for sample in samples), settings.slo)
    print_report(report, settings, console)
    try:
        if path := settings.json_file:
            write_json(path, report, settings, samples)
        if path := settings.plot_file:
            draw_plot(path, report, samples)
    except OSError as error:  # a full disk's does not name the file
        print(f"splitserve: {path}: cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    return status or (1 if report.num_failed else 0)


async def _interruptible(work: Coroutine[Any, Any, object]) -> None:
    """Cancel ``work`` by SIGINT. asyncio.run's own handler misses one that comes just before a wait."""
    task = asyncio.ensure_future(work)
    if threading.current_thread() is threading.main_thread():  # no other gets signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    await task


async def generate_load(
    settings: LoadSettings,
    on_end: Callable[[Sample], object] = lambda sample: None,
    requests: Sequence[LoadRequest] | None = None,
    key: str = "",
    tls: ssl.SSLContext | None = None,
    reuses_connections: bool = True,
) -> tuple[list[Sample], float]:
    """Send ``requests``, or those that the settings plan. Return the samples and the seconds from the first
    start to the last end. ``key``, ``tls``: see ``main``. ``reuses_connections``: False for a server that
    closes them without announcing it.

    Raises LoadError.
    """
    requests = planned_requests(settings) if requests is None else requests
    if not requests:
        raise LoadError(f"{settings.trace} has no requests")
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s, connect=30)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls or True, force_close=not reuses_connections)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(
        f"{settings.url}/", headers=headers, timeout=timeout, connector=connector
    ) as session:
        model = settings.served_model_name or await _first_model(session, settings.url)
        for request in draw_requests(settings, settings.warmup, settings.seed ^ WARMUP_SEED):
            sample = Sample(0.0)
            await _send(session, _body(request, model, settings), sample, time.perf_counter())
            if sample.error:
                raise LoadError(f"the first request failed: {sample.error}")
        return await _measure(session, model, settings, requests, on_end)


async def _measure(
    session: aiohttp.ClientSession,
    model: str,
    settings: LoadSettings,
    requests: Sequence[LoadRequest],
    on_end: Callable[[Sample], object],
) -> tuple[list[Sample], float]:
    bodies = [_body(request, model, settings) for request in requests]
    room = asyncio.Semaphore(settings.open_requests or len(requests))
    start = time.perf_counter()

    async def one(request: LoadRequest, body: bytes) -> Sample:
        await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - start)))
        # with --rate or --trace, waiting for room counts: the client would see it
        arrived = time.perf_counter() - start
        async with room:
            sample = Sample(arrived if settings.is_open else time.perf_counter() - start)
            await _send(session, body, sample, start)
        on_end(sample)
        return sample

    samples = await asyncio.gather(
        *(one(request, body) for request, body in zip(requests, bodies, strict=True))
    )
    return samples, max(sample.end for sample in samples)


async def _send(session: aiohttp.ClientSession, body: bytes, sample: Sample, start: float) -> None:
    """Sends one request and fills its sample."""
    try:
        async with session.post(
            "v1/completions", data=body, headers={"content-type": "application/json"}
        ) as response:
            if response.status != 200:
                sample.error = error_sentence(response.status, await response.read())
            else:
                await _read_events(response, sample, start)
    except (aiohttp.ClientError, TimeoutError) as error:
        sample.error = _sentence(error)
    sample.end = sample.arrivals[-1] if sample.arrivals else time.perf_counter() - start


async def _read_events(response: aiohttp.ClientResponse, sample: Sample, start: float) -> None:
    rest = b""
    done = False
    async for data in response.content.iter_any():
        now = time.perf_counter() - start
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                done = payload == b"[DONE]"
                if not done:
                    _note(orjson.loads(payload), sample, now)
    if not done and not sample.error:
        sample.error = "the stream ended without [DONE]"
    sample.num_output_tokens = sample.num_output_tokens or len(sample.arrivals)


def _sentence(error: Exception) -> str:
    """One sentence for an error: aiohttp mentions TLS even if a plain HTTP connection fails."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {error.os_error.strerror or error.os_error}"
    return f"{type(error).__name__}: {error}"


def _note(event: dict[str, Any], sample: Sample, now: float) -> None:
    if event.get("error"):
        sample.error = str(event["error"].get("message", event["error"]))
    if event.get("choices"):
        sample.arrivals.append(now)
    if usage := event.get("usage"):
        sample.num_prompt_tokens = usage["prompt_tokens"]
        sample.num_output_tokens = usage["completion_tokens"]
        sample.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _body(request: LoadRequest, model: str, settings: LoadSettings) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": settings.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get("v1/models") as response:
            if response.status != 200:
                reason = error_sentence(response.status, await response.read())
                raise LoadError(f"{url} does not list its models: {reason}")
            listed: Sequence[dict[str, Any]] = (await response.json())["data"]
            return str(listed[0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise LoadError(
            f"{url} does not list its models ({_sentence(error)}); is it running? If it "
            "never lists them, give --served-model-name"
        ) from error
