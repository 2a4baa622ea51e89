"""One virtual environment per backend, because their pins exclude each other.

A backend's pins are a lock file in `requirements/`, one per accelerator it runs on. The environment
lives in the cache folder under a name that holds the lock file's hash, and counts as made only when
its stamp, written last, is there. `QKIT_<BACKEND>_PYTHON`, such as `QKIT_SERVE_PYTHON`, points a
backend at an interpreter of the person's own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from qkit.cache import cache_dir
from qkit.errors import EnvironmentMissingError, InputError, nearest
from qkit.hashing import hash_value
from qkit.locks import lock
from qkit.protocol import write_json
from qkit.worker import worker_environment

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
#: Backend to what it is for.
BACKENDS: dict[str, str] = {
    "quantize": "llm-compressor: makes the quantized checkpoints",
    "serve": "vLLM: serves every variant",
    "autoawq": "AutoAWQ, for awq; archived upstream, succeeded by llm-compressor (quantize)",
    "gptqmodel": "GPTQModel, for gptq and awq",
    "autogptq": "AutoGPTQ, for gptq, CUDA only; archived upstream, succeeded by GPTQModel",
}
#: What `qkit env create` makes unasked; the others are for those who choose them.
DEFAULT_BACKENDS = ("quantize", "serve")
#: Module whose import proves that an environment works.
MAIN_MODULES: dict[str, str] = {
    "quantize": "llmcompressor",
    "serve": "vllm",
    "autoawq": "awq",
    "gptqmodel": "gptqmodel",
    "autogptq": "auto_gptq",
}
ACCELERATORS = ("cpu", "cuda")
STAMP = "complete.json"


@dataclass(frozen=True)
class SourceBuild:
    """A package that has no wheel and imports others of its environment while it is built.

    It is installed in two steps: these others first, then everything, the build seeing them.
    """

    package: str
    needs: tuple[str, ...]


#: Backend to the package that needs this.
SOURCE_BUILDS: dict[str, SourceBuild] = {
    "autoawq": SourceBuild("autoawq", needs=("setuptools", "torch")),
}
#: GPTQModel shares the CPUs out among its threads, and on fewer than this fails at import.
GPTQMODEL_CPUS = 4


@dataclass(frozen=True)
class Environment:
    """A backend's environment on this machine, made or not."""

    backend: str
    accelerator: str
    python: Path
    #: "missing", "incomplete", "ready", or "own" for an interpreter the person chose.
    state: str
    #: Hash of what is installed: the lock file, or the chosen interpreter's packages.
    fingerprint: str
    lock_file: Path


def find(backend: str, accelerator: str) -> Environment:
    """Return a backend's environment and its state.

    Raises:
        InputError: There is no such backend, or it does not run on this accelerator.
    """
    if backend not in BACKENDS:
        raise InputError(
            f"there is no backend {backend!r}{nearest(backend, BACKENDS)}",
            fix=f"backends are: {', '.join(BACKENDS)}",
        )
    lock_file = _lock_file(backend, accelerator)
    if not lock_file.is_file():
        able = " or ".join(a for a in ACCELERATORS if runs_on(backend, a))
        raise InputError(
            f"backend {backend!r} does not run on {accelerator}, only on {able}",
            fix=f"make it with `--accelerator {able}` for a machine that has it, or use another"
            " backend (`qkit env list`)",
        )
    digest = hashlib.sha256(lock_file.read_bytes()).hexdigest()
    if own := os.environ.get(f"QKIT_{backend.upper()}_PYTHON"):
        python = Path(own)
        state = "own" if os.access(python, os.X_OK) else "missing"
        fingerprint = hash_value(_installed(python)) if state == "own" else ""
        return Environment(backend, accelerator, python, state, fingerprint, lock_file)
    folder = cache_dir() / "environments" / f"{backend}-{accelerator}-{digest[:12]}"
    if (folder / STAMP).is_file():
        state = "ready"
    else:
        state = "incomplete" if folder.exists() else "missing"
    return Environment(backend, accelerator, folder / "bin" / "python", state, digest, lock_file)


def runs_on(backend: str, accelerator: str) -> bool:
    """Tell whether there are pins of a backend for an accelerator."""
    return _lock_file(backend, accelerator).is_file()


def made_or_default(accelerator: str) -> list[str]:
    """Return the backends that are always needed, and those whose environment is there."""
    return [
        name
        for name in BACKENDS
        if name in DEFAULT_BACKENDS
        or (runs_on(name, accelerator) and find(name, accelerator).state != "missing")
    ]


def _lock_file(backend: str, accelerator: str) -> Path:
    return REQUIREMENTS / f"{backend}-{accelerator}.txt"


def variables_of(backend: str) -> dict[str, str]:
    """Return the environment variables a backend's processes need on this machine."""
    if backend == "gptqmodel" and (os.cpu_count() or 1) < GPTQMODEL_CPUS:
        return {"GPTQMODEL_CPU_WORKERS": "2"}
    return {}


def python_of(backend: str, accelerator: str) -> Path:
    """Return the interpreter of a usable environment.

    Raises:
        EnvironmentMissingError: It was not made, or not finished.
    """
    environment = find(backend, accelerator)
    if environment.state not in ("ready", "own"):
        raise EnvironmentMissingError(
            f"the environment of backend {backend!r} is {environment.state} ({accelerator})",
            where=environment.python,
            fix=f"run `qkit env create {backend} --accelerator {accelerator}`",
        )
    return environment.python


def create(
    backend: str, accelerator: str, *, find_links: str | None = None, force: bool = False
) -> Environment:
    """Make a backend's environment; do nothing where it is ready.

    Args:
        backend: A key of `BACKENDS`.
        accelerator: "cpu" or "cuda".
        find_links: Folder or page of wheels to look in first. By default `$UV_FIND_LINKS` or
            `$PIP_FIND_LINKS`. A torch wheel found there is used; without one, torch's CPU build
            comes from PyTorch's own index.
        force: Make it anew even where it is ready.

    Raises:
        EnvironmentMissingError: The installer failed; its last lines are shown.
    """
    environment = find(backend, accelerator)
    if environment.state == "own" or (environment.state == "ready" and not force):
        return environment
    folder = environment.python.parent.parent
    with lock(folder.with_suffix(".lock"), f"the {backend} environment", wait_s=3600):
        if find(backend, accelerator).state == "ready" and not force:
            return find(backend, accelerator)  # another process made it meanwhile
        shutil.rmtree(folder, ignore_errors=True)
        _uv("venv", "--quiet", "--python", sys.executable, str(folder))
        sources = ["--quiet", "--python", str(environment.python)]
        sources += _sources(accelerator, find_links)
        if build := SOURCE_BUILDS.get(backend):
            pins = _pins(environment.lock_file)
            first = [f"{name}=={pins[name]}" for name in build.needs]
            _uv("pip", "install", *sources, *first)
            sources += ["--no-deps", "--no-build-isolation-package", build.package]
            _uv("pip", "install", *sources, "--requirements", str(environment.lock_file))
        else:
            _uv("pip", "sync", *sources, str(environment.lock_file))
        _import_main_module(environment)
        write_json(folder / STAMP, {"lock_file": environment.lock_file.name})
    return find(backend, accelerator)


def check(backend: str, accelerator: str) -> dict[str, str]:
    """Prove that an environment is whole; return its installed versions.

    Raises:
        EnvironmentMissingError: It is missing, a pinned package is absent or of another version,
            or the main module does not import.
    """
    python = python_of(backend, accelerator)
    environment = find(backend, accelerator)
    installed = _installed(python)
    if environment.state == "ready":
        for name, version in _pins(environment.lock_file).items():
            found = installed.get(name)
            if found is None or found.partition("+")[0] != version.partition("+")[0]:
                raise EnvironmentMissingError(
                    f"{name} is {found or 'missing'} in the {backend} environment, "
                    f"pinned is {version}",
                    where=python,
                    fix=f"run `qkit env create {backend} --accelerator {accelerator} --force`",
                )
    _import_main_module(environment)
    return installed


def _import_main_module(environment: Environment) -> None:
    module = MAIN_MODULES[environment.backend]
    done = subprocess.run(
        [str(environment.python), "-P", "-c", f"import {module}"],
        capture_output=True,
        text=True,
        check=False,
        env={**worker_environment(), **variables_of(environment.backend)},
    )
    if done.returncode:
        raise EnvironmentMissingError(
            f"`import {module}` fails in the {environment.backend} environment",
            where=environment.python,
            detail="\n".join(done.stderr.splitlines()[-8:]),
            fix=f"run `qkit env create {environment.backend} --force`",
        )


def _installed(python: Path) -> dict[str, str]:
    """Return the distributions an interpreter sees, normalized name to version."""
    code = (
        "import json, re, importlib.metadata as m;"
        "print(json.dumps({re.sub('[-_.]+', '-', d.name).lower(): d.version "
        "for d in m.distributions()}, sort_keys=True))"
    )
    done = subprocess.run(
        [str(python), "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=worker_environment(),
    )
    if done.returncode:
        raise EnvironmentMissingError(
            "the interpreter does not run", where=python, detail=done.stderr[-500:]
        )
    return dict(json.loads(done.stdout))


def _pins(lock_file: Path) -> dict[str, str]:
    """Return the normalized name and the version of every `name==version` line of a lock file."""
    pins = {}
    for line in lock_file.read_text().splitlines():
        name, separator, version = line.split(";")[0].strip().partition("==")
        if separator:
            pins[re.sub("[-_.]+", "-", name.split("[")[0]).lower()] = version.strip()
    return pins


def _sources(accelerator: str, find_links: str | None) -> list[str]:
    """Return uv's options that decide where torch comes from."""
    links = find_links or os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    options = ["--find-links", links] if links else []
    has_torch = bool(links) and any(Path(links or "").glob("torch-*.whl"))
    if accelerator == "cpu" and not has_torch:
        options += ["--torch-backend", "cpu"]
    return options


def _uv(*arguments: str) -> None:
    from uv import find_uv_bin  # noqa: PLC0415  (only creation needs it)

    done = subprocess.run([find_uv_bin(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentMissingError(
            f"`uv {arguments[0]}` failed while making an environment",
            detail="\n".join(done.stderr.splitlines()[-12:]),
            fix="check the network and the package index; behind a firewall give "
            "`qkit env create --find-links DIR` with the wheels",
        )
