"""Stands in for pynvml: GPUs with set power, utilisation and memory; energy follows the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    """As pynvml's."""


@dataclass
class FakeNvml:
    """A driver with some GPUs.

    Args:
        power_w: Of each GPU, constant.
        clock: Seconds; the energy counters grow with it.
        energy_counter: Whether the GPUs have one.
        driver: Whether there is a driver at all.
    """

    power_w: tuple[float, ...] = (300.0,)
    clock: Callable[[], float] = lambda: 0.0
    energy_counter: bool = True
    driver: bool = True
    opened: int = 0
    handles: list[object] = field(default_factory=list)

    NVMLError = NVMLError

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NVMLError("no driver")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.power_w):
            raise NVMLError("no such device")
        self.handles.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return self.nvmlDeviceGetHandleByIndex(int(uuid.rsplit("-", 1)[1]))

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=90 - 10 * handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return round(1000 * self.power_w[handle])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if not self.energy_counter:
            raise NVMLError("not supported")
        return round(1000 * self.power_w[handle] * self.clock())

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=(handle + 1) * 2**30, total=80 * 2**30)
