"""Reads the use, memory, temperature, power, energy and traffic of a worker's GPUs by NVML, on a thread.

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
    """Readings of the GPUs ``uuids`` ("GPU-...") together: the sum, the mean use, the highest temperature.
    ``nvml``: the module pynvml, initialized. Readings that one of them lacks are left out."""

    def __init__(self, nvml: Any, *uuids: str) -> None:
        """Raises NVMLError where there is no such GPU."""
        self.name = uuids[0] if len(uuids) == 1 else f"{uuids[0]}*{len(uuids)}"  # as Hello has it
        self.gauges: Mapping[str, float] = MappingProxyType({})
        self.counters: Mapping[str, float] = MappingProxyType({})
        """Cumulative since the driver was loaded."""
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gpu-telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def sample(self) -> None:
        """Asks the driver once."""
        n = self._nvml
        link_in, link_out = n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
        self.gauges = self._answers(
            gpu_utilization_ratio=lambda gpu: (
                n.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 / len(self._handles)
            ),
            gpu_memory_used_bytes=lambda gpu: n.nvmlDeviceGetMemoryInfo(gpu).used,
            gpu_memory_total_bytes=lambda gpu: n.nvmlDeviceGetMemoryInfo(gpu).total,
            gpu_temperature_celsius=lambda gpu: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
            gpu_power_watts=lambda gpu: n.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            gpu_pcie_receive_bytes_per_second=lambda gpu: (
                n.nvmlDeviceGetPcieThroughput(gpu, n.NVML_PCIE_UTIL_RX_BYTES) * 1024
            ),
            gpu_pcie_transmit_bytes_per_second=lambda gpu: (
                n.nvmlDeviceGetPcieThroughput(gpu, n.NVML_PCIE_UTIL_TX_BYTES) * 1024
            ),
        )
        self.counters = self._answers(
            gpu_energy_joules=lambda gpu: n.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
            gpu_nvlink_receive_bytes=lambda gpu: self._field(gpu, link_in) * 1024,
            gpu_nvlink_transmit_bytes=lambda gpu: self._field(gpu, link_out) * 1024,
        )

    def _follow(self) -> None:
        while not self._stopping.is_set():
            self.sample()
            self._stopping.wait(EVERY_S)

    def _answers(self, **questions: Callable[[Any], float]) -> Mapping[str, float]:
        answers: dict[str, float] = {}
        for name, ask in questions.items():
            try:
                readings = [ask(gpu) for gpu in self._handles]
                answers[name] = float((max if "temperature" in name else sum)(readings))
            except self._nvml.NVMLError as error:
                _log.debug("the GPU does not tell its %s: %s", name, error)
        return MappingProxyType(answers)

    def _field(self, gpu: Any, field: int) -> float:
        """Return the counter of all NVLinks together, in KiB."""
        (value,) = self._nvml.nvmlDeviceGetFieldValues(gpu, [(field, ALL_LINKS)])
        if value.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(value.nvmlReturn)
        return float(value.value.ullVal)


def telemetry_of(device: torch.device, ranks: int) -> GpuTelemetry | None:
    """Return the started telemetry of a torch device and the ones after it, one for each of ``ranks``; None
    without a GPU or a driver that answers."""
    if device.type != "cuda":
        return None
    import pynvml

    numbers = range(device.index or 0, (device.index or 0) + ranks)
    try:
        pynvml.nvmlInit()
        uuids = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in numbers]
        telemetry = GpuTelemetry(pynvml, *uuids)
    except pynvml.NVMLError as error:
        _log.warning("the GPU's driver tells nothing (%s): its metrics are left out", error)
        return None
    telemetry.start()
    return telemetry
