"""What can make a variant: the backends, the methods each does, and where each runs.

A literal table. llm-compressor does every method and is the default; the others are there for
those who need their formats or compare with them. Standard library and recipes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkit.errors import InputError
from qkit.quantize.checkpoint import HEAD, Checkpoint
from qkit.quantize.methods import is_symmetric
from qkit.quantize.schemes import METHODS, is_ignored
from qkit.recipe import Variant

#: Settings that every backend reads, or that do not concern it.
_GENERAL_SETTINGS = frozenset(
    {"method", "name", "backend", "calibration", "ignore", "group_size", "symmetric"}
)


@dataclass(frozen=True)
class Backend:
    """One library that quantizes.

    Attributes:
        entry: Function its worker runs, "module:function".
        environment: Name of its environment.
        methods: What it does.
        storage: Format it writes: "compressed-tensors", or "packed" for AutoAWQ's GEMM and GPTQ's.
        settings: Settings of a variant it reads besides the general ones; None for all.
        needs_cuda: Whether it does nothing without an NVIDIA GPU.
        output_multiple: What the outputs of every layer must be a multiple of.
        successor: What to use instead where it is archived upstream, else None.
    """

    entry: str
    environment: str
    methods: tuple[str, ...]
    storage: Literal["compressed-tensors", "packed"]
    settings: frozenset[str] | None = frozenset()
    needs_cuda: bool = False
    output_multiple: int = 1
    successor: str | None = None

    @property
    def archived(self) -> bool:
        """Whether its project has ended."""
        return self.successor is not None


DEFAULT_BACKEND = "llmcompressor"
_GPTQ_SETTINGS = frozenset({"actorder", "dampening_frac", "weight_bits"})
BACKENDS: dict[str, Backend] = {
    DEFAULT_BACKEND: Backend(
        entry="qkit.quantize.backend_llmcompressor:run",
        environment="quantize",
        methods=METHODS,
        storage="compressed-tensors",
        settings=None,
    ),
    "autoawq": Backend(
        entry="qkit.quantize.backend_autoawq:run",
        environment="autoawq",
        methods=("awq",),
        storage="packed",
        # Its search for the best clipping takes 64 or 256 rows at a time.
        output_multiple=64,
        successor="llmcompressor",
    ),
    "gptqmodel": Backend(
        entry="qkit.quantize.backend_gptqmodel:run",
        environment="gptqmodel",
        methods=("awq", "gptq"),
        storage="packed",
        settings=_GPTQ_SETTINGS,
        output_multiple=32,
    ),
    "autogptq": Backend(
        entry="qkit.quantize.backend_autogptq:run",
        environment="autogptq",
        methods=("gptq",),
        storage="packed",
        settings=_GPTQ_SETTINGS,
        needs_cuda=True,
        output_multiple=32,
        successor="gptqmodel",
    ),
}


def check_backend(checkpoint: Checkpoint, variant: Variant, accelerator: str) -> None:
    """Refuse what a variant's backend cannot do, before anything is loaded.

    Args:
        checkpoint: The source.
        variant: What to make, and with which backend.
        accelerator: "cpu" or "cuda".

    Raises:
        InputError: Says what it cannot do and which backend can.
    """
    name, backend = variant.backend, BACKENDS[variant.backend]
    if variant.method not in backend.methods:
        able = [other for other, row in BACKENDS.items() if variant.method in row.methods]
        raise InputError(
            f"backend {name!r} does not do {variant.method}; it does {', '.join(backend.methods)}",
            fix=f"for {variant.method} use backend {' or '.join(able)}",
        )
    if backend.needs_cuda and accelerator != "cuda":
        able = [
            other
            for other, row in BACKENDS.items()
            if variant.method in row.methods and not row.needs_cuda
        ]
        raise InputError(
            f"backend {name!r} quantizes on an NVIDIA GPU only, and this job runs on the CPU",
            fix=f"use backend {' or '.join(able)}, or run where there is a GPU",
        )
    if backend.settings is not None:
        _check_settings(variant, backend.settings)
    if backend.storage == "packed":
        _check_packed(checkpoint, variant, backend)


def _check_settings(variant: Variant, settings: frozenset[str]) -> None:
    """Refuse a setting the backend does not read: it would be taken for an effect."""
    for field, info in type(variant).model_fields.items():
        if field in _GENERAL_SETTINGS | settings or getattr(variant, field) == info.default:
            continue
        raise InputError(
            f"backend {variant.backend!r} does not read `{field}`",
            fix=f"leave `{field}` out, or use backend {DEFAULT_BACKEND}",
        )


def _check_packed(checkpoint: Checkpoint, variant: Variant, backend: Backend) -> None:
    """Refuse what the packed formats cannot hold or vLLM does not serve in them."""
    name = variant.backend
    if is_symmetric(variant) != (variant.method == "gptq"):
        kind = "with a zero point" if variant.method == "awq" else "without a zero point"
        raise InputError(
            f"vLLM serves the {variant.method.upper()} format that backend {name!r} writes only"
            f" {kind}",
            fix=f"leave `symmetric` out, or use backend {DEFAULT_BACKEND}",
        )
    kept = [layer for layer in checkpoint.linear_names if is_ignored(layer, variant.ignore)]
    if kept != [HEAD]:
        others = [layer for layer in kept if layer != HEAD]
        what = f"cannot leave out {others[0]}" if others else f"cannot quantize {HEAD}"
        raise InputError(
            f"backend {name!r} {what}: it quantizes all layers but {HEAD}",
            where=checkpoint.path,
            fix=f"use ignore: [{HEAD}], or backend {DEFAULT_BACKEND}",
        )
    for layer in checkpoint.linears:
        if layer.name != HEAD and layer.out_features % backend.output_multiple:
            raise InputError(
                f"{layer.name} has {layer.out_features} outputs; backend {name!r} needs a multiple"
                f" of {backend.output_multiple}",
                where=checkpoint.path,
                fix=f"use backend {DEFAULT_BACKEND}",
            )
