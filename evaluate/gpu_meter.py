"""Power, energy, utilisation and memory of the GPUs a server runs on, through NVML."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qkit.measurements import GpuUse


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All GPUs at one moment; None where the driver does not say."""

    at_s: float
    #: Watts, sum.
    power_w: float | None
    #: Percent, mean.
    utilisation: float | None
    #: Bytes in use, sum.
    memory_bytes: int | None
    #: Joules since the driver was loaded, sum.
    energy_j: float | None


class GpuMeter:
    """Reads some GPUs; open it with `open_meter`, and close it.

    Args:
        nvml: The `pynvml` module, initialised.
        handles: Devices to read.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = tuple(handles)

    @property
    def count(self) -> int:
        """How many GPUs are read."""
        return len(self._handles)

    def read(self, at_s: float) -> GpuReading:
        """Read all of them; a figure that one GPU does not have is None."""
        nvml = self._nvml
        utilisation = self._all(lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu)
        power_mw = self._all(nvml.nvmlDeviceGetPowerUsage)
        energy_mj = self._all(nvml.nvmlDeviceGetTotalEnergyConsumption)
        memory = self._all(lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used)
        return GpuReading(
            at_s=at_s,
            power_w=None if power_mw is None else sum(power_mw) / 1000,
            utilisation=None if utilisation is None else sum(utilisation) / len(utilisation),
            memory_bytes=None if memory is None else int(sum(memory)),
            energy_j=None if energy_mj is None else sum(energy_mj) / 1000,
        )

    def close(self) -> None:
        """Let the driver's library go."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, ask: Callable[[Any], float]) -> list[float] | None:
        try:
            return [ask(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return None


def open_meter(count: int, *, nvml: Any = None, visible: str | None = None) -> GpuMeter | None:
    """Return a meter for the first GPUs a server sees, or None where there is no driver.

    NVML counts all GPUs of the machine; the server those of CUDA_VISIBLE_DEVICES.

    Args:
        count: GPUs of the server: its tensor-parallel size.
        nvml: Stands in for `pynvml`.
        visible: Stands in for CUDA_VISIBLE_DEVICES.
    """
    if count < 1:
        return None
    if nvml is None:
        import pynvml  # noqa: PLC0415  (loads the driver's library; only with a GPU)

        nvml = pynvml
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    names = names or [str(index) for index in range(count)]
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(name)
            for name in names[:count]
        ]
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None
    return GpuMeter(nvml, handles)


def summarize_gpus(count: int, readings: Sequence[GpuReading]) -> GpuUse | None:
    """Sum readings of one cell up, in order of time; None without any.

    Means leave out the first and the last reading, which are taken before and after the requests.
    """
    if not readings:
        return None
    inside = readings[1:-1]
    power = [r.power_w for r in inside if r.power_w is not None]
    utilisation = [r.utilisation for r in inside if r.utilisation is not None]
    memory = [r.memory_bytes for r in readings if r.memory_bytes is not None]
    return GpuUse(
        count=count,
        utilisation_percent=sum(utilisation) / len(utilisation) if utilisation else None,
        power_w_mean=sum(power) / len(power) if power else None,
        power_w_max=max(power, default=None),
        energy_j=_energy_j(readings),
        memory_bytes_max=max(memory, default=None),
    )


def _energy_j(readings: Sequence[GpuReading]) -> float | None:
    """Return the counter's growth, else the trapezoid rule over power; None from one reading."""
    first, last = readings[0], readings[-1]
    if len(readings) < 2:
        return None
    if first.energy_j is not None and last.energy_j is not None:
        return last.energy_j - first.energy_j
    powers = [(r.at_s, r.power_w) for r in readings if r.power_w is not None]
    if len(powers) != len(readings):
        return None
    return sum(
        (after_s - before_s) * (before_w + after_w) / 2
        for (before_s, before_w), (after_s, after_w) in itertools.pairwise(powers)
    )
