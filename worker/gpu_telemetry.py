"""Reads a GPU's use, memory, temperature, power, energy and traffic by NVML, on a thread of its own.

Some of NVML's answers take tens of milliseconds (PCIe counters are sampled while one waits): a worker's loop
only picks up the last ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

EVERY_S = 2.0
ALL_LINKS = 0xFFFFFFFF
_log = logging.getLogger(__name__)


class GpuTelemetry:
    """Readings of the GPU ``uuid`` ("GPU-..."). ``nvml``: the module pynvml, initialized. Readings that a GPU
    lacks are left out."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """Raises NVMLError where there is no such GPU."""
        self.uuid = uuid
        self.gauges: Mapping[str, float] = MappingProxyType({})
        self.counters: Mapping[str, float] = MappingProxyType({})
        """Cumulative since the driver was loaded."""
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gpu-telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def sample(self) -> None:
        """Asks the driver once."""
        n, gpu = self._nvml, self._handle
        link_in, link_out = n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
        self.gauges = self._answers(
            gpu_utilization_ratio=lambda: n.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            gpu_memory_used_bytes=lambda: n.nvmlDeviceGetMemoryInfo(gpu).used,
            gpu_memory_total_bytes=lambda: n.nvmlDeviceGetMemoryInfo(gpu).total,
            gpu_temperature_celsius=lambda: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
            gpu_power_watts=lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            gpu_pcie_receive_bytes_per_second=lambda: (
                n.nvmlDeviceGetPcieThroughput(gpu, n.NVML_PCIE_UTIL_RX_BYTES) * 1024
            ),
            gpu_pcie_transmit_bytes_per_second=lambda: (
                n.nvmlDeviceGetPcieThroughput(gpu, n.NVML_PCIE_UTIL_TX_BYTES) * 1024
            ),
        )
        self.counters = self._answers(
            gpu_energy_joules=lambda: n.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
            gpu_nvlink_receive_bytes=lambda: self._field(link_in) * 1024,
            gpu_nvlink_transmit_bytes=lambda: self._field(link_out) * 1024,
        )

    def _follow(self) -> None:
        while not self._stopping.is_set():
            self.sample()
            self._stopping.wait(EVERY_S)

    def _answers(self, **questions: Callable[[], float]) -> Mapping[str, float]:
        answers: dict[str, float] = {}
        for name, ask in questions.items():
            try:
                answers[name] = float(ask())
            except self._nvml.NVMLError as error:
                _log.debug("the GPU does not tell its %s: %s", name, error)
        return MappingProxyType(answers)

    def _field(self, field: int) -> float:
        """Return the counter of all NVLinks together, in KiB."""
        (value,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, ALL_LINKS)])
        if value.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(value.nvmlReturn)
        return float(value.value.ullVal)


def telemetry_of(device: torch.device) -> GpuTelemetry | None:
    """Return the started telemetry of a torch device; None without a GPU or a driver that answers."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        telemetry = GpuTelemetry(pynvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        _log.warning("the GPU's driver tells nothing (%s): its metrics are left out", error)
        return None
    telemetry.start()
    return telemetry
