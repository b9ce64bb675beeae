"""Which kernels run a model: chosen once from the device, said in one log line."""

from __future__ import annotations

import logging

import torch

from .interface import Kernels
from .reference import TorchKernels

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device) -> Kernels:
    logger.info("kernels: plain torch on %s", device)
    return TorchKernels()
