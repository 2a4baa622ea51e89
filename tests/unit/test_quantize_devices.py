"""The table of cards, and what this machine's driver calls them."""

from __future__ import annotations

import pytest

from qkit.errors import InputError
from qkit.measurements import Hardware
from qkit.quantize.devices import DEVICES, find_device, local_device


def hardware(name: str, gib: float, capability: str | None = "8.0") -> Hardware:
    return Hardware(
        accelerator="cuda" if capability else "cpu",
        name=name,
        memory_bytes=int(gib * 2**30),
        cpu="a CPU",
        cpu_cores=8,
        compute_capability=capability,
    )


def test_the_cards_that_were_promised() -> None:
    assert set(DEVICES) == {
        "A800-40", "A800-80", "A100-40", "A100-80", "H100", "H200", "L40S", "RTX4090",
    }  # fmt: skip
    for device in DEVICES.values():
        assert device.bandwidth
        # A card reads its whole memory in 20 to 60 ms; a slipped digit would not.
        assert 0.019 < device.memory_bytes / device.bandwidth < 0.06


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("A800-80", "A800-80"),
        ("a800-80", "A800-80"),
        ("NVIDIA A800 80", "A800-80"),
        ("a800", "A800-80"),
        ("4090", "RTX4090"),
        ("GeForce RTX 4090", "RTX4090"),
        ("h200", "H200"),
    ],
)
def test_cards_are_found_as_people_type_them(typed: str, name: str) -> None:
    assert find_device(typed).name == name


def test_an_unknown_card_gets_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no card 'H10O' in the table, did you mean 'H100'") as e:
        find_device("H10O")
    assert "L40S" in (e.value.fix or "")


@pytest.mark.parametrize(
    ("name", "gib", "like"),
    [
        ("NVIDIA A800-SXM4-80GB", 79.3, "A800-80"),
        ("NVIDIA A800 80GB PCIe", 80.0, "A800-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40"),
        ("NVIDIA H100 80GB HBM3", 79.6, "H100"),
        ("NVIDIA H200", 140.4, "H200"),
        ("NVIDIA GeForce RTX 4090", 24.0, "RTX4090"),
    ],
)
def test_this_machines_card_takes_the_tables_bandwidth(name: str, gib: float, like: str) -> None:
    device = local_device(hardware(name, gib))
    assert device is not None
    assert device.bandwidth == DEVICES[like].bandwidth
    assert device.memory_bytes == int(gib * 2**30)
    assert device.local


@pytest.mark.parametrize(("name", "gib"), [("NVIDIA H100 NVL", 93.6), ("NVIDIA GeForce X", 16)])
def test_a_card_that_is_not_in_the_table_has_no_bandwidth(name: str, gib: float) -> None:
    device = local_device(hardware(name, gib, "12.1"))
    assert device is not None
    assert device.bandwidth is None
    assert device.capability == (12, 1)
    assert device.capability_label == "12.1"


def test_a_machine_without_gpu_has_no_card() -> None:
    assert local_device(hardware("a CPU", 64, None)) is None
