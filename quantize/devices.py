"""Cards that `qkit plan` knows: memory, memory bandwidth and compute capability.

Memory is the data sheet's GB taken as 10^9 bytes; drivers report as much, give or take a few
percent (an 80 GB A100 shows 85.1e9, an L40S with ECC 47.8e9). Bandwidth is that of the fastest form
factor sold under the name, so that a time computed from it stays a lower bound on all of them.
Compute capabilities are those of https://developer.nvidia.com/cuda-gpus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qkit.errors import InputError, nearest
from qkit.measurements import Hardware

GB = 10**9
#: How far a card's reported memory may be from the data sheet's for it to be the same model.
_MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True)
class Device:
    """A card as far as serving arithmetic needs it.

    Attributes:
        name: Short name, as given to `--gpu`.
        memory_bytes: Memory of one card.
        bandwidth: Peak memory bandwidth in bytes a second; None where it is not known.
        capability: Compute capability, major and minor.
        local: Whether it is this machine's own.
    """

    name: str
    memory_bytes: int
    bandwidth: float | None
    capability: tuple[int, int]
    local: bool = False

    @property
    def capability_label(self) -> str:
        """Compute capability as it is written, for example "8.0"."""
        return f"{self.capability[0]}.{self.capability[1]}"


#: Every card by its short name.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # NVIDIA A800 40GB Active data sheet: 40 GB HBM2, 1,555.2 GB/s.
        Device("A800-40", 40 * GB, 1555.2e9, (8, 0)),
        # NVIDIA A800 80GB: the A100's GA100 and HBM2e (PCIe 1,935 GB/s, SXM 2,039 GB/s), with
        # NVLink at 400 instead of 600 GB/s.
        Device("A800-80", 80 * GB, 2039e9, (8, 0)),
        # NVIDIA A100 40GB data sheet: 40 GB HBM2, 1,555 GB/s for PCIe and SXM.
        Device("A100-40", 40 * GB, 1555e9, (8, 0)),
        # NVIDIA A100 80GB data sheet: 80 GB HBM2e, PCIe 1,935 GB/s, SXM 2,039 GB/s.
        Device("A100-80", 80 * GB, 2039e9, (8, 0)),
        # NVIDIA H100 data sheet: 80 GB, SXM 3.35 TB/s, PCIe 2 TB/s.
        Device("H100", 80 * GB, 3350e9, (9, 0)),
        # NVIDIA H200 data sheet: 141 GB HBM3e, 4.8 TB/s.
        Device("H200", 141 * GB, 4800e9, (9, 0)),
        # NVIDIA L40S data sheet: 48 GB GDDR6 with ECC, 864 GB/s.
        Device("L40S", 48 * GB, 864e9, (8, 9)),
        # NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: 24 GB GDDR6X, 1,008 GB/s.
        Device("RTX4090", 24 * GB, 1008e9, (8, 9)),
    )
}
#: What people also call them.
_ALIASES = {"4090": "RTX4090", "A800": "A800-80", "A100": "A100-80"}
#: A word of the driver's name to the cards of that family; the memory tells them apart.
_FAMILIES = {
    "A800": ("A800-40", "A800-80"),
    "A100": ("A100-40", "A100-80"),
    "H100": ("H100",),
    "H200": ("H200",),
    "L40S": ("L40S",),
    "4090": ("RTX4090",),
}


def find_device(name: str) -> Device:
    """Return a card by its short name, upper or lower case, with or without spaces and hyphens.

    Raises:
        InputError: qkit does not know it; the nearest known name is given.
    """
    wanted = _plain(name)
    known = {_plain(key): DEVICES[key] for key in DEVICES}
    known |= {_plain(alias): DEVICES[key] for alias, key in _ALIASES.items()}
    if wanted in known:
        return known[wanted]
    raise InputError(
        f"no card {name!r} in the table{nearest(name.upper(), DEVICES)}",
        fix=f"give one of: {', '.join(DEVICES)}; `auto` takes this machine's own",
    )


def local_device(hardware: Hardware) -> Device | None:
    """Return this machine's card, with the memory its driver reports; None without a GPU.

    The bandwidth comes from the table where the driver's name and memory are those of one of its
    cards, and is None elsewhere.
    """
    if hardware.accelerator != "cuda" or hardware.compute_capability is None:
        return None
    major, _, minor = hardware.compute_capability.partition(".")
    words = re.split(r"[^A-Za-z0-9]+", hardware.name)
    candidates = [DEVICES[key] for word in words for key in _FAMILIES.get(word, ())]
    same = [
        device
        for device in candidates
        if abs(device.memory_bytes - hardware.memory_bytes)
        <= _MEMORY_TOLERANCE * device.memory_bytes
    ]
    return Device(
        name=hardware.name.removeprefix("NVIDIA "),
        memory_bytes=hardware.memory_bytes,
        bandwidth=same[0].bandwidth if same else None,
        capability=(int(major), int(minor)),
        local=True,
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
