"""What runs where: schemes against compute capability, layers against tensor parallel sizes.

Rules are those of vLLM 0.32/0.33; each says where it was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkit.quantize.checkpoint import Checkpoint, Linear
from qkit.quantize.methods import scheme_of
from qkit.quantize.schemes import GROUP_SIZES, Scheme, is_ignored
from qkit.recipe import Variant

Capability = tuple[int, int]
Support = Literal["native", "weight-only", "refused"]

#: vLLM serves BF16, and so the baseline, from here on (`CudaPlatform.check_if_supports_dtype`).
FIRST_WITH_BF16: Capability = (8, 0)
#: Tensor cores with FP8 arithmetic; below, FP8 weights go through Marlin with 16-bit inputs
#: (https://docs.vllm.ai, "FP8 W8A8").
FIRST_WITH_FP8: Capability = (8, 9)
#: vLLM has no INT8 kernels from here on ("INT8 W8A8", Blackwell limitation; for 12.x it stops with
#: `Int8 not supported on SM120` after loading).
FIRST_WITHOUT_INT8: Capability = (10, 0)
#: The one with a kernel (Machete) for 8-bit weights with zero points; Marlin takes 4-bit ones only
#: (`query_marlin_supported_quant_types`, `query_machete_supported_quant_types`).
WITH_MACHETE: Capability = (9, 0)
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
#: Layers whose inputs are split over the cards; all others are split by outputs.
ROW_PARALLEL = ("o_proj", "down_proj")
KEY_VALUE = ("k_proj", "v_proj")
DOWN = "down_proj"


@dataclass(frozen=True)
class Verdict:
    """How a scheme runs on a card.

    Attributes:
        support: "native" (quantized arithmetic, or 16 bits for the baseline), "weight-only"
            (weights are expanded to 16 bits in the kernel) or "refused".
        reason: What that means there, in a few words.
        fix: What to do instead, for "refused".
    """

    support: Support
    reason: str
    fix: str | None = None


@dataclass(frozen=True)
class TensorParallelVerdict:
    """Whether a variant can be split over a number of cards.

    Attributes:
        size: Tensor parallel size.
        obstacles: What does not divide, a few words each; empty if it can be split.
        fix: What to do about it; None if nothing helps but another size.
    """

    size: int
    obstacles: tuple[str, ...] = ()
    fix: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it can be split so."""
        return not self.obstacles


def check_capability(scheme: Scheme | None, capability: Capability) -> Verdict:
    """Say how a scheme runs on cards of a compute capability.

    Args:
        scheme: The variant's; None for the 16-bit baseline.
        capability: Compute capability, major and minor.
    """
    shown = f"{capability[0]}.{capability[1]}"
    if capability < FIRST_WITH_BF16:
        return Verdict(
            "refused",
            f"vLLM serves BF16 models from compute capability 8.0 on; this is {shown}",
            "use an Ampere or newer card (A800, A100, L40S, H100)",
        )
    if scheme is None:
        return Verdict("native", "16-bit arithmetic")
    if scheme.activations is None:
        if needs_machete(scheme) and capability != WITH_MACHETE:
            return Verdict(
                "refused",
                f"vLLM has no kernel for 8-bit weights with zero points on {shown}: Marlin takes"
                " none",
                "use symmetric: true, which costs 8-bit weights next to nothing",
            )
        kernel = " (Machete, not Marlin)" if needs_machete(scheme) else ""
        return Verdict("weight-only", f"{scheme.weights.num_bits}-bit weights{kernel}")
    if scheme.weights.type == "float":
        if capability < FIRST_WITH_FP8:
            return Verdict("weight-only", "no FP8 units: FP8 Marlin, 16-bit arithmetic")
        return Verdict("native", "FP8 arithmetic")
    if capability >= FIRST_WITHOUT_INT8:
        return Verdict(
            "refused",
            f"vLLM has no INT8 W8A8 kernels for compute capability {shown}",
            "use fp8 there; INT8 W8A8 runs on 8.0 to 9.0",
        )
    return Verdict("native", "INT8 arithmetic")


def needs_machete(scheme: Scheme) -> bool:
    """Tell whether weights have 8 bits and zero points, which Marlin has no kernel for."""
    weights = scheme.weights
    return scheme.activations is None and weights.num_bits == 8 and not weights.symmetric


def cpu_obstacle(variant: Variant, avx512: bool | None) -> str | None:
    """Return what keeps vLLM's CPU build from serving a variant, None if nothing is known to.

    From vLLM 0.32: `CPUWNA16LinearKernel` takes 4-bit weights alone, and its operator
    (`cpu_gemm_wna16`) is left out of the library for CPUs without AVX-512; so is an FP8 KV cache
    (`_get_attn_isa`). FP8 with channel and token scales runs everywhere. For other scales there are
    kernels with AMX tiles, which were tried: the server died of static scales while it loaded
    (`static_scaled_fp8_quant` is not in the library), and of block scales as well.

    Args:
        variant: What is to be served.
        avx512: Whether the CPU has AVX-512; None if not known: then it is taken for there.
    """
    scheme = scheme_of(variant)
    weights = scheme.weights
    if scheme.activations is None and weights.num_bits == 8:
        return "vLLM's CPU build has no kernel for 8-bit weights with 16-bit inputs"
    if scheme.activations is None and avx512 is False:
        return "vLLM's CPU build serves 4-bit weights with AVX-512 only"
    if weights.type == "float" and weights.strategy != "channel":
        return f"vLLM's CPU build does not serve FP8 with one scale a {weights.strategy}"
    if variant.kv_cache == "fp8" and avx512 is False:
        return "vLLM's CPU build keeps an FP8 KV cache with AVX-512 only"
    return None


def check_tensor_parallel(
    checkpoint: Checkpoint, variant: Variant | None, size: int
) -> TensorParallelVerdict:
    """Say whether a variant (None: the baseline) can be split over `size` cards.

    vLLM splits attention by heads, `o_proj` and `down_proj` by their inputs, all else by outputs.
    Every part of a row-split layer must hold whole quantization groups; Marlin pads what its tiles
    need but not a group that lies across two cards (`MarlinLinearKernel.can_implement`).
    """
    obstacles = _obstacles_of_the_model(checkpoint, size)
    if obstacles:
        return TensorParallelVerdict(size, obstacles, f"use one of {_sizes_that_fit(checkpoint)}")
    if variant is None:
        return TensorParallelVerdict(size)
    split = [
        linear
        for linear in checkpoint.linears
        if linear.name.endswith(ROW_PARALLEL) and not is_ignored(linear.name, variant.ignore)
    ]
    weights = scheme_of(variant).weights
    if weights.block_structure is not None:
        return _split_blocks(checkpoint, variant, weights.block_structure, size)
    unit = weights.group_size or 1
    broken = _broken(split, unit, size)
    if not broken:
        return TensorParallelVerdict(size)
    obstacles = tuple(
        f"{kind}: {inputs:,} / {size} = {inputs / size:,g} inputs, not whole groups of {unit}"
        for kind, inputs in broken
    )
    return TensorParallelVerdict(size, obstacles, _fix(checkpoint, split, unit, size))


def _split_blocks(
    checkpoint: Checkpoint, variant: Variant, block: tuple[int, int], size: int
) -> TensorParallelVerdict:
    """Say whether every card holds whole blocks, as vLLM's `validate_fp8_block_shape` asks."""
    wrong = {}
    for linear in checkpoint.linears:
        part = split_linear(linear, checkpoint, size)
        if (part[0] % block[0] or part[1] % block[1]) and not is_ignored(
            linear.name, variant.ignore
        ):
            wrong[linear.name.rpartition(".")[2]] = part
    return TensorParallelVerdict(
        size,
        tuple(
            f"{kind}: {rows:,} x {columns:,} a card, not whole blocks of {block[0]} x {block[1]}"
            for kind, (rows, columns) in sorted(wrong.items())
        ),
        "scales: dynamic (one scale a row)" if wrong else None,
    )


def padded_size(inputs: int, group_size: int, tensor_parallel: int) -> int:
    """Return the next size that splits into whole groups on every card.

    Zero rows and columns added to the MLP leave the model's function as it is; Qwen pads the 72B
    model's 29,568 to 29,696 so (https://qwen.readthedocs.io, "GPTQ", Troubleshooting).
    """
    step = group_size * tensor_parallel
    return -(-inputs // step) * step


def split_linear(linear: Linear, checkpoint: Checkpoint, size: int) -> tuple[int, int]:
    """Return (outputs, inputs) of one card's part of a layer.

    Key and value heads are repeated where there are fewer of them than cards.
    """
    if linear.name.endswith(ROW_PARALLEL):
        return linear.out_features, linear.in_features // size
    if linear.name.endswith(KEY_VALUE):
        return kv_heads_per_card(checkpoint, size) * checkpoint.head_dim, linear.in_features
    return linear.out_features // size, linear.in_features


def kv_heads_per_card(checkpoint: Checkpoint, size: int) -> int:
    """Return the key/value heads one of `size` cards holds."""
    return max(1, checkpoint.num_kv_heads // size)


def _obstacles_of_the_model(checkpoint: Checkpoint, size: int) -> tuple[str, ...]:
    """Return what keeps the model itself, quantized or not, from being split."""
    found = []
    if checkpoint.num_heads % size:
        found.append(f"{checkpoint.num_heads} attention heads are not divisible by {size}")
    kv = checkpoint.num_kv_heads
    if max(kv, size) % min(kv, size):
        found.append(f"{kv} key/value heads and {size} cards do not divide")
    if checkpoint.intermediate_size % size:
        found.append(f"{checkpoint.intermediate_size:,} MLP columns are not divisible by {size}")
    return tuple(found)


def _sizes_that_fit(checkpoint: Checkpoint) -> str:
    fitting = [n for n in TENSOR_PARALLEL_SIZES if not _obstacles_of_the_model(checkpoint, n)]
    return "--tensor-parallel " + ", ".join(map(str, fitting))


def _broken(split: list[Linear], unit: int, size: int) -> list[tuple[str, int]]:
    """Return (kind of layer, its inputs) of layers whose parts would not hold whole groups."""
    kinds = {(lin.name.rpartition(".")[2], lin.in_features) for lin in split}
    return sorted(kind for kind in kinds if kind[1] % size or kind[1] // size % unit)


def _fix(checkpoint: Checkpoint, split: list[Linear], unit: int, size: int) -> str:
    """Suggest a group size, padding or another tensor parallel size."""
    ways = []
    smaller = [n for n in GROUP_SIZES if n < unit and not _broken(split, n, size)]
    if smaller:
        ways.append(f"group_size {smaller[0]}")
    if all(kind == DOWN for kind, _ in _broken(split, unit, size)):
        wider = padded_size(checkpoint.intermediate_size, unit, size)
        ways.append(
            f"pad the MLP from {checkpoint.intermediate_size:,} to {wider:,} with zeros before"
            " quantizing"
        )
    fitting = [
        n
        for n in TENSOR_PARALLEL_SIZES
        if n != size and not _obstacles_of_the_model(checkpoint, n) and not _broken(split, unit, n)
    ]
    if fitting:
        ways.append(f"tensor parallel {', '.join(map(str, fitting))}")
    ways.append("a method with channel scales (fp8, smoothquant)")
    return "; or ".join(ways)
