"""What machine this is: GPUs through NVML, the CPU and memory through the system."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

import psutil

from qkit.errors import InputError
from qkit.measurements import Hardware

Accelerator = Literal["cpu", "cuda"]


def detect_accelerator(asked: str = "auto") -> Accelerator:
    """Return "cuda" where NVML finds a GPU, else "cpu"; an explicit choice is checked.

    Raises:
        InputError: "cuda" was asked for and there is no NVIDIA GPU.
    """
    if asked == "cpu":
        return "cpu"
    found = _gpu() is not None
    if asked == "cuda" and not found:
        raise InputError(
            "accelerator 'cuda' was asked for, but NVML finds no NVIDIA GPU here",
            fix="use `accelerator: auto` or `--accelerator cpu`, or run `nvidia-smi` to see why",
        )
    return "cuda" if found else "cpu"


def describe(accelerator: Accelerator) -> Hardware:
    """Return the machine as it is stored with every measurement."""
    cpu, cores = _cpu_name(), psutil.cpu_count(logical=True) or 1
    gpu = _gpu() if accelerator == "cuda" else None
    if gpu is None:
        return Hardware(
            accelerator="cpu",
            name=cpu,
            memory_bytes=psutil.virtual_memory().total,
            cpu=cpu,
            cpu_cores=cores,
        )
    return gpu.model_copy(update={"cpu": cpu, "cpu_cores": cores})


def _gpu() -> Hardware | None:
    """Return the first GPU (and how many there are), or None without a driver."""
    import pynvml  # noqa: PLC0415  (loads the driver's library; only where it is asked for)

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        if count == 0:
            return None
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Hardware(
            accelerator="cuda",
            name=_text(pynvml.nvmlDeviceGetName(handle)),
            count=count,
            memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            cpu="",
            cpu_cores=1,
            compute_capability=f"{major}.{minor}",
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
        )
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def has_avx512() -> bool | None:
    """Tell whether an x86 CPU has AVX-512; None on other CPUs and where Linux does not tell.

    Intel's servers have it since 2017 (Skylake-SP), AMD's since 2022 (Genoa).
    """
    flags = (_cpu_info("flags") or "").split()
    return "avx512f" in flags if flags else None


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(field: str) -> str | None:
    """Return a field of the first CPU in Linux's account of them."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith(field):
                return line.partition(":")[2].strip()
    return None
