"""Which linear kernels ran, by the lines that vLLM's versions log. Pure.

The table's wording and versions are those of vLLM's source: of 0.6.0, 0.6.5, 0.7.3, 0.8.5, 0.9.2,
0.10.2, 0.11.2, 0.14.1, 0.18.1, 0.22.1, 0.26.0, 0.32.0 and 0.33.0. `tests/golden/logs` holds lines
of each kind.

What no version says stays unknown: before 0.18 an FP8 checkpoint on a GPU with FP8 arithmetic runs
CUTLASS or torch without a word, as do compressed-tensors' W4A16 layers before 0.6.4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: Begins marks about kernels, which reports show loudly.
LOUD = "KERNEL:"
#: Name of a kernel that only weights are quantized for.
MARLIN_FP8 = "MarlinFP8 (weight-only)"


@dataclass(frozen=True)
class KernelLine:
    """A log line that tells about a kernel.

    Attributes:
        pattern: The line; group 1 is the kernel's name where `name` is None.
        name: What to call the kernel.
        kind: "class" names what was chosen for a layer type and outranks "method", which names a
            way of loading; "slow" is a fallback of some layers, always shown.
        versions: Those whose source has the line.
        source: File of vLLM's that logs it.
    """

    pattern: re.Pattern[str]
    name: str | None
    kind: Literal["class", "method", "slow"]
    versions: str
    source: str


def _line(
    pattern: str, name: str | None, kind: Literal["class", "method", "slow"], versions: str, at: str
) -> KernelLine:
    return KernelLine(re.compile(pattern), name, kind, versions, at)


AWQ_SLOW = "AWQ GEMM (slow path)"
GPTQ_SLOW = "GPTQ Exllama (slow path)"

KERNEL_LINES: tuple[KernelLine, ...] = (
    # "Using MacheteLinearKernel for CompressedTensorsWNA16" (0.6.4 on), "... for
    # GPTQMarlinLinearMethod" (to 0.21), "... for AutoGPTQLinearMethod" (0.22 on), "... for
    # AWQMarlinLinearMethod" (0.22), "... for AutoAWQMarlinLinearMethod" (0.26 on), "Using
    # CutlassScaledMMLinearKernel for CompressedTensorsW8A8Int8" (0.7 to 0.17). One wording for
    # Marlin, Machete, AllSpark (W8A16), Exllama, BitBLAS, Conch, CUTLASS, Triton and CPU kernels.
    _line(
        r"\bUsing (\w+LinearKernel) for (?!mixed-precision)\w+",
        None,
        "class",
        "0.6.4 to 0.33",
        "quantization/gptq_marlin.py, schemes/compressed_tensors_wNa16.py",
    ),
    # "Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8", also block kernels,
    # whose class names end in Kernel alone.
    _line(
        r"\bSelected (\w+Kernel) for \w+",
        None,
        "class",
        "0.18 to 0.33",
        "kernels/linear/__init__.py",
    ),
    # "Using MarlinLinearKernel for mixed-precision linear"
    _line(
        r"\bUsing (\w+LinearKernel) for mixed-precision linear",
        None,
        "class",
        "0.32 to 0.33",
        "kernels/linear/__init__.py",
    ),
    # "Using MarlinMxfp8LinearKernel for MXFP8 GEMM" is in the first pattern; with
    # VLLM_BATCH_INVARIANT=1 no kernel is chosen.
    _line(
        r"\bUsing (dequantize \+ batch-invariant matmul) for \w+",
        None,
        "class",
        "0.33",
        "schemes/compressed_tensors_wNa16.py",
    ),
    _line(r"Using awq_marlin kernel", "awq_marlin", "method", "0.6 to 0.25", "awq_marlin.py"),
    _line(r"Using gptq_marlin kernel", "gptq_marlin", "method", "0.6 to 0.21", "gptq_marlin.py"),
    _line(r"Using gptq_bitblas kernel", "gptq_bitblas", "method", "0.8 to 0.17", "gptq_bitblas.py"),
    # "Your GPU does not have native support for FP8 computation but FP8 quantization is being
    # used. Weight-only FP8 compression will be used leveraging the Marlin kernel."
    _line(
        r"Weight-only FP8 compression will be used leveraging the Marlin kernel",
        MARLIN_FP8,
        "method",
        "0.6 to 0.33",
        "quantization/utils/marlin_utils_fp8.py",
    ),
    # "awq quantization is not fully optimized yet. The speed can be slower than non-quantized
    # models."
    _line(
        r"\bawq quantization is not fully optimized yet", AWQ_SLOW, "method", "0.6 to 0.10",
        "config.py",
    ),
    _line(
        r"\bgptq quantization is not fully optimized yet", GPTQ_SLOW, "method", "0.6 to 0.10",
        "config.py",
    ),
    # "Layer 'model.layers.0.mlp.down_proj' is not supported by AWQMarlin. Falling back to
    # unoptimized AWQ kernels."
    _line(
        r"is not supported by (?:Auto)?AWQMarlin\. Falling back to unoptimized AWQ kernels",
        AWQ_SLOW,
        "slow",
        "0.9 to 0.33",
        "awq_marlin.py, auto_awq.py",
    ),
)  # fmt: skip

#: "quantization=awq" of the engine's configuration line. From 0.26 on vLLM turns that method into
#: auto_awq, which takes Marlin, so the plain name is the slow path of the versions before.
_PLAIN_METHODS = {"awq": AWQ_SLOW, "gptq": GPTQ_SLOW}
_ON_CPU = re.compile(r"CPU KV cache|device_config=cpu|cpu_(?:worker|executor|model_runner)\.py")
#: "Detected that the model can run with awq_marlin, however you specified quantization=awq
#: explicitly, so forcing awq. Use quantization=awq_marlin for faster inference" (0.6 to 0.25).
_FORCED = re.compile(r"can run with (\w+), however you specified quantization=(\w+) explicitly")
#: A warning of 0.32 and 0.33; before, such a server does not start.
_NO_BACKEND_KERNEL = re.compile(
    r"--linear-backend=(\w+) (?:has no kernel for this linear layer type|was requested, but no)"
)


def find_kernels(text: str, quantization: str | None) -> tuple[str, ...]:
    """Return the kernels a log names, in order of appearance, without repeats.

    Args:
        text: The server's log.
        quantization: Method vLLM says it loads the checkpoint as.
    """
    found: dict[str, list[tuple[int, str]]] = {"class": [], "method": [], "slow": []}
    for line in KERNEL_LINES:
        for match in line.pattern.finditer(text):
            found[line.kind].append((match.start(), line.name or match.group(1)))
    named = (found["class"] or found["method"]) + found["slow"]
    names = tuple(dict.fromkeys(name for _, name in sorted(named)))
    if not names and quantization in _PLAIN_METHODS and not _ON_CPU.search(text):
        return (_PLAIN_METHODS[quantization],)
    return names


def kernel_marks(text: str, kernels: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a reader must know of how a kernel came to run."""
    marks = []
    if forced := _FORCED.search(text):
        better, method = forced.groups()
        marks.append(
            f"{LOUD} --quantization {method} forces vLLM's slow {method} path although the "
            f"checkpoint can run with {better}; leave the flag out"
        )
    elif any("(slow path)" in name for name in kernels):
        slow = " + ".join(name for name in kernels if "(slow path)" in name)
        marks.append(f"{LOUD} {slow} ran, which vLLM itself calls not fully optimized")
    if any(name == MARLIN_FP8 or name.startswith("MarlinFP8") for name in kernels):
        marks.append(
            "FP8 weight-only: Marlin multiplies in 16 bits, so this is not the FP8 of GPUs with "
            "FP8 arithmetic"
        )
    if missing := _NO_BACKEND_KERNEL.search(text):
        marks.append(
            f"vLLM has no {missing.group(1)} kernel for a layer type of this checkpoint; it chose "
            "itself there"
        )
    return tuple(marks)


def kernel_mismatch(asked: str, kernels: tuple[str, ...]) -> str | None:
    """Return a loud mark where a kernel was asked for and another one ran.

    Args:
        asked: Kernel family asked for on the command line, for example "marlin", or "auto".
        kernels: Kernels the log names.
    """
    if asked == "auto" or not kernels:
        return None
    wrong = [name for name in kernels if not _is_of_family(name, asked)]
    if not wrong:
        return None
    return f"{LOUD} asked for {asked}, ran {', '.join(wrong)}"


def _is_of_family(kernel: str, family: str) -> bool:
    """Tell whether a kernel's name contains the family's, "flashinfer_cutlass" without the line."""
    return family.replace("_", "").lower() in kernel.replace("_", "").lower()
