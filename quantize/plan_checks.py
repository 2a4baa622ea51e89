"""What `qkit plan` looks at before anything is made, one finding at a time.

The refusals are those of the preflight and of every quantize; here each becomes a line, so that a
person sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qkit.errors import InputError
from qkit.quantize.backends import BACKENDS, check_backend
from qkit.quantize.checkpoint import (
    HEAD_WEIGHT,
    Checkpoint,
    describe_config,
    inspect_checkpoint,
)
from qkit.quantize.compatibility import WITH_MACHETE, cpu_obstacle, needs_machete
from qkit.quantize.devices import GB, Device
from qkit.quantize.methods import scheme_of
from qkit.quantize.preflight import check_group_size, check_ignore, check_source, check_variant
from qkit.quantize.resources import ToMake, disk_rooms, memory_room
from qkit.quantize.smoothing import smoothing_of
from qkit.quantize.weight_files import has_weights
from qkit.recipe import Variant

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What it is about: a part of the checkpoint, a variant's label or a resource.
        status: "problem" keeps something from being made or served as asked; "note" does not.
        text: What was found.
        fix: What to do about it.
    """

    name: str
    status: Status
    text: str
    fix: str | None = None


def read_checkpoint(folder: Path) -> tuple[Checkpoint, tuple[Check, ...]]:
    """Describe a checkpoint as far as it is there, and say how far that is.

    Without weights, or where they are not whole, shapes are those of config.json.

    Raises:
        InputError: There is no folder, or its config.json cannot be used.
    """
    if folder.is_dir() and not has_weights(folder):
        return describe_config(folder), (
            Check(
                "files",
                "note",
                "no weights in this folder: all shapes come from config.json",
                "run this again after the download; the files themselves are checked then",
            ),
        )
    try:
        checkpoint = inspect_checkpoint(folder)
    except InputError as problem:
        try:
            described = describe_config(folder)
        except InputError:
            raise problem from None
        return described, (Check("files", "problem", problem.what, problem.fix),)
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    return checkpoint, (
        Check(
            "files",
            "ok",
            f"{len(checkpoint.tensors)} tensors in {len(files)} safetensors"
            f" file{'s' if len(files) > 1 else ''}, complete, with the shapes of config.json",
        ),
    )


def source_check(checkpoint: Checkpoint) -> Check:
    """Say whether variants can be made of a checkpoint at all."""
    try:
        check_source(checkpoint)
    except InputError as error:
        return Check("source", "problem", error.what, error.fix)
    return Check("source", "ok", f"{checkpoint.architecture}, {checkpoint.dtype}, not quantized")


def embeddings_check(checkpoint: Checkpoint) -> Check:
    """Name which of the three spellings of the output head a checkpoint has."""
    if checkpoint.redundant_head:
        return Check(
            "embeddings",
            "note",
            f"config.json says they are tied, and {HEAD_WEIGHT} is stored too:"
            f" {checkpoint.redundant_head.bytes / GB:.2f} GB that are not loaded, nor kept in a"
            " variant",
            "if the stored head differs from the embeddings, set tie_word_embeddings to false",
        )
    if checkpoint.tied:
        return Check("embeddings", "ok", "tied: the head is the embedding matrix, not stored again")
    return Check("embeddings", "ok", f"not tied: {HEAD_WEIGHT} is a matrix of its own")


def remote_code_checks(checkpoint: Checkpoint, *, trusted: bool) -> list[Check]:
    """Say what becomes of Python code the checkpoint brings along; nothing where it brings none."""
    if not checkpoint.remote_code:
        return []
    modules = ", ".join(checkpoint.remote_code)
    if trusted:
        text = f"the checkpoint's own Python code will run, as the recipe allows: {modules}"
        return [Check("remote code", "note", text, "read it first; Qwen2.5 needs none")]
    text = f"config.json names Python code of its own ({modules}); it is not run"
    fix = "Qwen2.5 needs none; trust_remote_code: true in the recipe would run it"
    return [Check("remote code", "note", text, fix)]


def variant_problem(
    checkpoint: Checkpoint, variant: Variant, *, source_is_fine: bool, accelerator: str
) -> Check | None:
    """Return what keeps a variant from being made, beside what is wrong with the source."""
    try:
        check_backend(checkpoint, variant, accelerator)
        if source_is_fine:
            check_variant(checkpoint, variant)
        else:
            check_ignore(checkpoint, variant)
            check_group_size(checkpoint, variant)
    except InputError as error:
        return Check(variant.label, "problem", error.what, error.fix)
    return None


def smoothing_check(checkpoint: Checkpoint, variant: Variant) -> Check | None:
    """Name the smoothing mappings a method applies and skips; None for a method without any."""
    smoothing = smoothing_of(checkpoint, variant)
    if smoothing is None:
        return None
    applied = "; ".join(map(str, smoothing.applied)) or "nothing"
    skipped = "".join(f". Skipped: {mapping} ({reason})" for mapping, reason in smoothing.skipped)
    return Check(variant.label, "ok", f"smooths {applied}{skipped}")


def kernel_check(variant: Variant, kernel: str, devices: Sequence[Device]) -> Check | None:
    """Say where the kernel asked for cannot serve a variant that the card could."""
    hopper = any(device.capability == WITH_MACHETE for device in devices)
    if kernel != "marlin" or not hopper or not needs_machete(scheme_of(variant)):
        return None
    return Check(
        variant.label,
        "problem",
        "serve.kernel asks for Marlin, which has no kernel for 8-bit weights with zero points",
        "use serve.kernel: auto, which takes Machete on 9.0, or symmetric: true",
    )


def cpu_checks(variant: Variant, avx512: bool | None) -> list[Check]:
    """Say what a machine without a GPU can make of a variant and cannot serve, or cannot make."""
    checks = []
    if BACKENDS[variant.backend].needs_cuda:
        text = f"backend {variant.backend} quantizes on an NVIDIA GPU only; this machine has none"
        checks.append(Check(variant.label, "note", text, "run it where there is a GPU"))
    if obstacle := cpu_obstacle(variant, avx512):
        text = f"can be made without a GPU, but not served here: {obstacle}"
        checks.append(Check(variant.label, "note", text, "serve it on a GPU"))
    return checks


def resource_checks(checkpoint: Checkpoint, to_make: Sequence[ToMake]) -> list[Check]:
    """Hold this machine's disk and memory against what making the variants takes.

    A full disk is a problem where the checkpoint is: without its weights this is hardly the
    machine they will be quantized on.
    """
    if not to_make:
        return []
    lacking: Status = "problem" if checkpoint.weights_stored else "note"
    checks = [
        Check(
            "disk",
            "ok" if room.enough else lacking,
            f"about {_gb(room.needed)} to be written, {_gb(room.free)} free in {room.where}",
            None
            if room.enough
            else "free some space, point QKIT_ARTIFACTS at another disk, or make fewer variants",
        )
        for room in disk_rooms(checkpoint, to_make)
    ]
    room = memory_room(checkpoint, to_make)
    return [
        *checks,
        Check(
            "memory",
            "ok" if room.enough else "note",
            f"quantizing takes about {_gb(room.needed)} (a rough figure); {_gb(room.free)}"
            " available here",
            None
            if room.enough
            else "use a machine with more memory, or fewer or shorter calibration samples",
        ),
    ]


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 10**6:.0f} MB"
