"""Power, energy and memory against a fake driver."""

from __future__ import annotations

import pytest
from fakes.nvml import FakeNvml

from qkit.evaluate.gpu_meter import GpuMeter, open_meter, summarize_gpus

GIB = 2**30


def opened(nvml: FakeNvml, count: int = 1, visible: str = "") -> GpuMeter:
    meter = open_meter(count, nvml=nvml, visible=visible)
    assert meter is not None
    return meter


def test_readings_of_several_gpus_add_up() -> None:
    nvml = FakeNvml(power_w=(300, 200), clock=lambda: 10)
    with opened(nvml, 2) as meter:
        reading = meter.read(10)
    assert reading.power_w == 500
    assert reading.utilisation == 85
    assert reading.memory_bytes == 3 * GIB
    assert reading.energy_j == 5000
    assert nvml.opened == 0


def test_energy_is_the_counters_growth() -> None:
    times = (100.0, 101.0, 104.0)
    meter = opened(FakeNvml(power_w=(250,), clock=iter(times).__next__))
    readings = [meter.read(at) for at in times]
    use = summarize_gpus(1, readings)
    assert use is not None
    assert use.energy_j == pytest.approx(4 * 250)
    assert (use.power_w_mean, use.power_w_max) == (250, 250)
    assert use.memory_bytes_max == GIB


def test_without_a_counter_power_is_integrated() -> None:
    meter = opened(FakeNvml(power_w=(250,), energy_counter=False))
    use = summarize_gpus(1, [meter.read(at) for at in (0.0, 0.5, 2.0)])
    assert use is not None
    assert use.energy_j == pytest.approx(2 * 250)


def test_too_few_samples_are_unknown_and_not_zero() -> None:
    meter = opened(FakeNvml())
    use = summarize_gpus(1, [meter.read(0.0), meter.read(0.1)])
    assert use is not None
    assert (use.power_w_mean, use.utilisation_percent) == (None, None)
    assert summarize_gpus(1, []) is None


@pytest.mark.parametrize(
    ("visible", "handles"), [("", [0, 1]), ("2,3", [2, 3]), ("GPU-a-3,GPU-b-1", [3, 1])]
)
def test_the_gpus_are_those_the_server_sees(visible: str, handles: list[int]) -> None:
    nvml = FakeNvml(power_w=(1, 2, 3, 4))
    opened(nvml, 2, visible)
    assert nvml.handles == handles


def test_no_gpu_no_driver_no_such_device() -> None:
    assert open_meter(0, nvml=FakeNvml()) is None
    assert open_meter(1, nvml=FakeNvml(driver=False)) is None
    nvml = FakeNvml()
    assert open_meter(1, nvml=nvml, visible="7") is None
    assert nvml.opened == 0
