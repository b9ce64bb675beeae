"""Metrics as Prometheus reads them, and the alert rules and the Grafana dashboard that come with them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from support.batch_server import add_file
from support.http_fakes import ADMIN_KEY, OPERATOR, FakeDispatcher

from splitserve.coordinator.batch.store import BatchStore
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.lifecycle.lifecycle import Lifecycle
from splitserve.coordinator.metrics.system_collector import WORKER_COUNTERS, WORKER_GAUGES
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot, WorkerSnapshot
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.stored_bytes import StoredBytes
from splitserve.coordinator.text.served_model import ServedModel

MONITORING = Path(__file__).resolve().parents[3] / "deploy" / "monitoring"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    not (PROMTOOL and PROMETHEUS), reason="no prometheus here: apt-get install prometheus"
)


def worker(name: str, role: str, device: str = "", **more: float) -> WorkerSnapshot:
    counters, gauges = (
        {**dict.fromkeys(WORKER_COUNTERS, 5.0), **more},
        dict.fromkeys(WORKER_GAUGES, 0.5) if device else {},
    )
    gauges["start_seconds_weights"] = 2.0
    return WorkerSnapshot(
        name, role, 100, 50, 20, 30, 0, 2, 1, 17, 5, counters, device=device, gauges=gauges, busy=0.25
    )


def everything() -> SystemSnapshot:
    """Workers with GPUs, and whatever the lifecycle counts."""
    counters = Lifecycle(1, "hybrid").counters()
    steering = {
        "wanted_workers": {"prefill": 2, "decode": 1},
        "load": {"prefill": 0.5, "decode": 0.9},
        "counts": {"flip": 1},
    }
    workers = [worker("p", "prefill", "GPU-1"), worker("d", "decode", "GPU-2")]
    return SystemSnapshot(ready=True, workers=workers, counters=counters, steering=steering)


@pytest.fixture
async def metrics(
    dispatcher: FakeDispatcher, model: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """All that /metrics can have. Nothing is sampled but by this, however long it takes."""
    monkeypatch.setattr("splitserve.coordinator.server.SAMPLE_EVERY_S", 1e6)
    store = BatchStore(tmp_path / "batches")
    add_file(store, "acme", b"x", 1.0)
    stored, operators = StoredBytes({"files": tmp_path / "batches"}), Operators(ADMIN_KEY)
    parts = AppParts(system=everything, operators=operators, price_per_hour=2.0, stored=stored)
    server = HttpServer(HttpApp(dispatcher, model, parts))
    await server.start()
    async with asyncio.timeout(60):
        while not next(stored.collect()).samples:
            await asyncio.sleep(0.01)
    store.close()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60, headers=OPERATOR
    ) as http:
        for body in (
            {"prompt": "quick", "max_tokens": 5, "stream": True},
            {"prompt": "quick"},
            {"prompt": 3},
        ):
            await http.post("/v1/completions", json=body)
        for now, grown in ((0.0, 0.0), (10.0, 100.0)):
            more = {"output_tokens": grown, "gpu_energy_joules": grown}
            server.app.metrics.efficiency.sample(
                now, SystemSnapshot(workers=[worker("d", "decode", "GPU-2", **more)])
            )
        of_routes = server.app.generation.route_counts
        of_routes.requests["chat", "a"] += 1
        of_routes.shadowed("chat", "different", 3)
        text = (await http.get("/metrics")).text
    await server.stop(grace_s=0)
    return text


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bsplitserve_[a-z0-9_]+", text))


def queries() -> list[str]:
    """The Grafana dashboard's."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


async def test_every_query_names_a_metric_that_exists(metrics: str) -> None:
    known = set(re.findall(r"^(splitserve_[a-z0-9_]+)", metrics, re.M))
    assert len(queries()) > 50
    used = {name for query in queries() for name in names_in(query)}
    assert used - known == set()
    alerts = re.sub(r"^ +(summary|description):.*$", "", (MONITORING / "alerts.yml").read_text(), flags=re.M)
    assert names_in(alerts) - known == set()
    reported = {name for name in known if not name.endswith(("_created", "_bucket"))}
    assert {
        "splitserve_refusals_total",
        "splitserve_cost_per_million_tokens",
        "splitserve_joules_per_token",
    } <= reported


async def test_every_metric_that_the_docs_name_exists(metrics: str) -> None:
    """Also in short, as `_recoveries_total` in a list whose first has the whole name."""
    known = re.findall(r"^(splitserve_[a-z0-9_]+)", metrics, re.M)
    families = {name.removesuffix("_bucket") for name in known}
    named: set[str] = set()
    for page in (MONITORING.parents[1] / "docs").glob("*.md"):
        text = (
            page.read_text()
            .replace("{parse,queue,prefill,handoff,decode,stream}", "queue")
            .replace("{stage}", "decode")
        )
        named |= {"splitserve" + name for name in re.findall(r"`(_[a-z0-9_]+_(?:total|seconds))`", text)}
        named |= set(re.findall(r"`(splitserve_[a-z0-9_]+)`", text))
    assert len(named) > 30
    assert named - families == set()


async def test_a_phase_of_a_workers_start_is_a_label(metrics: str) -> None:
    assert 'splitserve_worker_start_seconds{phase="weights",role="decode",worker="d"} 2.0' in metrics
    assert 'splitserve_worker_busy_ratio{role="decode",worker="d"} 0.25' in metrics
    assert "start_seconds_weights" not in metrics


async def test_refusals_are_counted_by_reason(metrics: str) -> None:
    assert re.search(
        r'^splitserve_refusals_total\{model_name="tiny",reason="invalid_request_error"\} 1\.0$', metrics, re.M
    )


async def test_without_a_gpu_or_a_price_nothing_is_made_up(http: httpx.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    assert not re.search(r"^splitserve_\w*(gpu|joule|cost)", text, re.M)


@needs_prometheus
async def test_promtool_accepts_metrics_and_rules(metrics: str, tmp_path: Path) -> None:
    shutil.copytree(MONITORING, tmp_path, dirs_exist_ok=True)
    (tmp_path / "admin.key").write_text(ADMIN_KEY)
    checked = subprocess.run(
        [str(PROMTOOL), "check", "metrics"],
        input=metrics,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr
    config = subprocess.run(
        [str(PROMTOOL), "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert config.returncode == 0, config.stdout + config.stderr
    assert re.search(r"SUCCESS: [0-9]+ rules found", config.stdout)


@needs_prometheus
def test_alerts_fire_by_how_fast_a_budget_burns() -> None:
    path = Path(__file__).parent / "alerts_test.yml"
    tested = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


async def test_the_objectives_are_bounds_of_the_histograms(metrics: str) -> None:
    """Every rule's bound is a bucket: without one the rule would be silent."""
    named = set(
        re.findall(r'(splitserve_\w+_bucket)\{le=~?"([^"]+)"\}', (MONITORING / "alerts.yml").read_text())
    )
    assert len(named) == 3
    for name, bound in named:
        assert re.search(rf'^{name}\{{.*le="{bound}"', metrics, re.M), f"{name} has no bucket {bound}"


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """A real one that scrapes ``target`` four times a second; its address, of a port that the system chose
    for it."""
    config = (
        (MONITORING / "prometheus.yml")
        .read_text()
        .replace("127.0.0.1:8000", target)
        .replace("interval: 5s", "interval: 250ms")
    )
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(MONITORING / "alerts.yml", folder)
    (folder / "admin.key").write_text(ADMIN_KEY)
    command = [
        str(PROMETHEUS),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
    ]
    with subprocess.Popen(
        [*command, "--web.listen-address=127.0.0.1:0"], stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (
                listening := [
                    c.laddr
                    for c in psutil.Process(process.pid).net_connections("tcp")
                    if c.status == psutil.CONN_LISTEN
                ]
            ):
                assert process.poll() is None, "Prometheus has ended"
                assert time.monotonic() < deadline, "Prometheus does not listen"
                time.sleep(0.02)
            yield f"http://127.0.0.1:{listening[0].port}"
        finally:
            process.terminate()


@needs_prometheus
async def test_a_real_prometheus_scrapes_it(
    server: HttpServer, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    await http.post("/v1/completions", json={"prompt": "quick", "max_tokens": 5})
    with prometheus(f"127.0.0.1:{server.port}", tmp_path) as address:
        async with httpx.AsyncClient(base_url=address, verify=False, timeout=60) as asker:
            found = await answered(asker, 'splitserve_requests_total{status="200"}')
            assert found["value"][1] == "1"
            assert found["metric"]["job"] == "splitserve"
            assert (
                await answered(
                    asker, "histogram_quantile(0.5, splitserve_e2e_request_latency_seconds_bucket)"
                )
            )["value"]
            for query in queries():
                answer = await asker.get(
                    "/api/v1/query",
                    params={"query": query.replace("$instance", ".*").replace("$__rate_interval", "1m")},
                )
                assert answer.json()["status"] == "success", answer.text
            rules = (await asker.get("/api/v1/rules")).json()["data"]["groups"]
            assert {group["name"] for group in rules} == set(
                re.findall(r"- name: (\S+)", (MONITORING / "alerts.yml").read_text())
            )
            assert not [rule for group in rules for rule in group["rules"] if rule.get("lastError")]


async def answered(
    asker: httpx.AsyncClient, query: str, timeout_s: float = 60.0
) -> dict[str, dict[str, str]]:
    """The first result of a query, as soon as there is one."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            results = (await asker.get("/api/v1/query", params={"query": query})).json()["data"]["result"]
        except (httpx.HTTPError, ValueError, KeyError):
            results = []  # it has not begun to listen, or to answer
        if results:
            result: dict[str, dict[str, str]] = results[0]
            return result
        await asyncio.sleep(0.1)
    raise AssertionError(f"Prometheus knows nothing of {query} after {timeout_s:g} s")
