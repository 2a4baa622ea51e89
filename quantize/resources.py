"""Whether this machine has the disk, the memory and the hardware for the variants asked for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from qkit.errors import InputError
from qkit.measurements import Hardware
from qkit.quantize.checkpoint import Checkpoint
from qkit.quantize.compatibility import check_capability
from qkit.quantize.devices import GB, local_device
from qkit.quantize.estimate import disk_bytes, memory_bytes
from qkit.quantize.methods import scheme_of
from qkit.recipe import Calibration, Variant


@dataclass(frozen=True)
class ToMake:
    """A variant to be made: with what data, and in which folder."""

    variant: Variant
    calibration: Calibration
    folder: Path


@dataclass(frozen=True)
class Room:
    """What is needed of a resource and what there is, in bytes."""

    needed: int
    free: int
    where: Path

    @property
    def enough(self) -> bool:
        """Whether there is as much as is needed."""
        return self.free >= self.needed


def check_resources(checkpoint: Checkpoint, to_make: Sequence[ToMake], hardware: Hardware) -> None:
    """Refuse to begin what the disk cannot hold or this machine's GPU cannot serve.

    Memory is not refused: its estimate is rough, and `qkit plan` warns.

    Args:
        checkpoint: The source.
        to_make: Variants that are not there yet, or not as they should be.
        hardware: This machine.

    Raises:
        InputError: Names the method and the compute capability, or the bytes needed and free.
    """
    device = local_device(hardware)
    for item in to_make if device else ():
        assert device is not None
        verdict = check_capability(scheme_of(item.variant), device.capability)
        if verdict.support == "refused":
            raise InputError(
                f"{item.variant.label} does not run on this machine's {device.name}:"
                f" {verdict.reason}",
                fix=f"{verdict.fix}; to make it for another machine, use --accelerator cpu",
            )
    for room in disk_rooms(checkpoint, to_make):
        if not room.enough:
            raise InputError(
                f"the disk has {_gb(room.free)} free; making"
                f" {', '.join(item.variant.label for item in to_make)} takes about"
                f" {_gb(room.needed)}",
                where=room.where,
                fix="free some space, point QKIT_ARTIFACTS at another disk, or make fewer variants",
            )


def disk_rooms(checkpoint: Checkpoint, to_make: Sequence[ToMake]) -> list[Room]:
    """Return what is needed and free on every disk that is written to.

    A folder that is there already stays until its successor is whole, and then goes, so of those
    only the largest successor takes room.
    """
    rooms: dict[int, Room] = {}
    replaced: dict[int, int] = {}
    for item in to_make:
        where = existing_parent(item.folder.parent)
        disk = where.stat().st_dev
        size = disk_bytes(checkpoint, item.variant, item.calibration)
        room = rooms.setdefault(disk, Room(0, shutil.disk_usage(where).free, where))
        if item.folder.exists():
            replaced[disk] = max(replaced.get(disk, 0), size)
        else:
            rooms[disk] = Room(room.needed + size, room.free, room.where)
    return [
        Room(room.needed + replaced.get(disk, 0), room.free, room.where)
        for disk, room in rooms.items()
    ]


def memory_room(checkpoint: Checkpoint, to_make: Sequence[ToMake]) -> Room:
    """Return what the greediest variant needs of the machine's memory, and what is available."""
    needed = max(
        (memory_bytes(checkpoint, item.variant, item.calibration) for item in to_make), default=0
    )
    return Room(needed, psutil.virtual_memory().available, Path("/"))


def existing_parent(path: Path) -> Path:
    """Return the nearest folder above a path (or the path itself) that exists."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"
