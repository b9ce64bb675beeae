"""A worker's readings of its GPU, from a driver played by the test."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, get_type_hints

import pynvml
import pytest
import torch

from splitserve.coordinator.metrics.efficiency import num_gpus_of
from splitserve.transport.messages.messages import Hello, Load
from splitserve.transport.process.reports import with_telemetry
from splitserve.worker.gpu_telemetry import ALL_LINKS, GpuTelemetry, telemetry_of

UUID, SECOND = (f"GPU-5c4b7a5c-0000-0000-0000-00000000000{number}" for number in range(2))


class FakeNvml:
    """A GPU without NVLink. Errors and constants are pynvml's own."""

    NVMLError, NVML_SUCCESS = pynvml.NVMLError, pynvml.NVML_SUCCESS
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = (
        pynvml.NVML_PCIE_UTIL_RX_BYTES,
        pynvml.NVML_PCIE_UTIL_TX_BYTES,
    )
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX

    def __init__(self, nvlink: bool = False) -> None:
        self.nvlink, self.asked = nvlink, threading.Event()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid in (UUID, SECOND)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=87 if handle == UUID else 13)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61 if handle == UUID else 65

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_500 if handle == UUID else 87_500

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        return 10 if counter == self.NVML_PCIE_UTIL_RX_BYTES else 20

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 5_000

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[Any]:
        ((field, links),) = fields
        assert links == ALL_LINKS
        self.asked.set()
        found = 7 if field == self.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX else 9
        status = self.NVML_SUCCESS if self.nvlink else pynvml.NVML_ERROR_NOT_SUPPORTED
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(ullVal=found))]


def test_readings_in_base_units() -> None:
    telemetry = GpuTelemetry(FakeNvml(nvlink=True), UUID)
    telemetry.sample()
    assert telemetry.gauges == {
        "gpu_utilization_ratio": 0.87,
        "gpu_memory_used_bytes": 3 << 30,
        "gpu_memory_total_bytes": 80 << 30,
        "gpu_temperature_celsius": 61,
        "gpu_power_watts": 412.5,
        "gpu_pcie_receive_bytes_per_second": 10240,
        "gpu_pcie_transmit_bytes_per_second": 20480,
    }
    assert telemetry.counters == {
        "gpu_energy_joules": 5.0,
        "gpu_nvlink_receive_bytes": 7168,
        "gpu_nvlink_transmit_bytes": 9216,
    }


def test_the_readings_of_a_workers_gpus_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = GpuTelemetry(nvml := FakeNvml(nvlink=True), UUID, SECOND)
    telemetry.sample()
    assert telemetry.gauges == {
        "gpu_utilization_ratio": 0.5,  # on average
        "gpu_memory_used_bytes": 6 << 30,
        "gpu_memory_total_bytes": 160 << 30,
        "gpu_temperature_celsius": 65,  # of the hottest
        "gpu_power_watts": 500,
        "gpu_pcie_receive_bytes_per_second": 20480,
        "gpu_pcie_transmit_bytes_per_second": 40960,
    }
    assert telemetry.counters["gpu_energy_joules"] == 10
    assert num_gpus_of(telemetry.name) == 2
    of_many = GpuTelemetry(nvml, *[UUID] * 64).name
    (bound,) = get_type_hints(Hello, include_extras=True)["device"].__metadata__
    assert num_gpus_of(of_many) == 64
    assert len(of_many) <= bound.max_length

    def refused(handle: str) -> int:
        if handle == SECOND:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 5_000

    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", refused)
    telemetry.sample()
    assert "gpu_energy_joules" not in telemetry.counters, "a part of it would be wrong"


def test_what_a_gpu_does_not_tell_is_left_out_of_the_heartbeat() -> None:
    nvml = FakeNvml()
    telemetry = GpuTelemetry(nvml, UUID)
    telemetry.start()
    assert nvml.asked.wait(60)
    telemetry.stop()
    numbers = (
        "blocks_free",
        "blocks_cached",
        "blocks_used",
        "blocks_leased",
        "num_running",
        "num_waiting",
        "num_waiting_tokens",
        "steps",
    )
    load = Load(
        worker_id="d",
        incarnation=1,
        busy=False,
        accepting=True,
        counters={"preemptions": 1.0},
        **dict.fromkeys(numbers, 0),
    )
    reported = with_telemetry(load, telemetry)
    assert reported.counters == {"preemptions": 1.0, "gpu_energy_joules": 5.0}
    assert reported.gauges["gpu_power_watts"] == 412.5


def test_without_a_gpu_there_is_no_telemetry() -> None:
    assert telemetry_of(torch.device("cpu"), 2) is None


def test_a_driver_that_does_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert telemetry_of(torch.device("cuda"), 2) is None
