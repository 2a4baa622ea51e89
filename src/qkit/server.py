"""A vLLM server as a context manager: start it or attach to one, read its log, stop for certain.

The server leads a process group of its own, listens on 127.0.0.1 only, and is ready when /health
answers. It has failed as soon as its process exits; the reason shown is its own. When the block
is left, by whatever way, every process of the group is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkit import processes
from qkit.errors import InputError, ServerError
from qkit.hardware import Accelerator
from qkit.hashing import hash_value
from qkit.kernel_log import kernel_mismatch
from qkit.kernel_switch import KernelChoice, choose_kernel, installed_vllm
from qkit.measurements import MemoryUse, ServerRecord
from qkit.recipe import Serve
from qkit.server_log import advice_on, failure_reason, parse_log
from qkit.worker import worker_environment

HOST = "127.0.0.1"
POLL_S = 0.25
TAIL_LINES = 12
_STARTED = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)
#: Environment variables whose values change results, recorded with every measurement.
RECORDED = ("VLLM_", "OMP_", "CUDA_VISIBLE_DEVICES", "MKL_")
#: Methods whose layers Marlin has a true kernel for. INT8 W8A8 has none, and FP8 with native
#: support would fall back from W8A8 to weight-only.
WEIGHT_ONLY_METHODS = frozenset({"awq", "gptq", "rtn"})
#: First compute capability with FP8 tensor cores (Ada); below it FP8 runs weight-only.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class ServerSpec:
    """Everything that decides how a variant is served.

    Attributes:
        python: Interpreter of the serve environment.
        model_path: Checkpoint folder.
        name: Name the model is served under.
        method: How the checkpoint was quantized; None for the baseline.
        accelerator: "cpu" or "cuda".
        compute_capability: Of the GPU, for example "8.0".
        serve: The recipe's settings.
        log: File the server's output goes to; an older one is replaced.
        port: Port to listen on; None takes a free one.
        trust_remote_code: Whether the checkpoint's own Python code may run.
    """

    python: Path
    model_path: Path
    name: str
    method: str | None
    accelerator: Accelerator
    serve: Serve
    log: Path
    compute_capability: str | None = None
    port: int | None = None
    trust_remote_code: bool = False


@dataclass
class RunningServer:
    """A server that answers.

    Attributes:
        base_url: For example "http://127.0.0.1:8000".
        model: Name to send as `model`.
        record: What is stored with measurements taken from it.
        gpus: GPUs of this machine that it runs on; 0 where there are none or it was attached to.
    """

    base_url: str
    model: str
    record: ServerRecord
    log: Path | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    gpus: int = 0

    def memory_use(self) -> MemoryUse | None:
        """Return what its processes have taken; None for an attached server."""
        return None if self._process is None else processes.memory_of_group(self._process.pid)

    def is_alive(self) -> bool:
        """Tell whether its process runs; an attached server counts as running."""
        return self._process is None or self._process.poll() is None

    def check_alive(self, grace_s: float = 0.0) -> None:
        """Raise a ServerError with the server's own reason if its process has ended.

        Args:
            grace_s: How long to wait for a process that may be about to end.
        """
        if self._process is not None and grace_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_s)
        if self._process is not None and self._process.poll() is not None and self.log:
            raise _died(self._process.returncode, self.log, "died")


@contextlib.contextmanager
def serve(
    spec: ServerSpec, *, on_wait: Callable[[float], None] | None = None
) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, and stop it when the block ends.

    Args:
        spec: What to serve and how.
        on_wait: Called with the seconds waited, about four times a second.

    Raises:
        InputError: The port is taken.
        ServerError: It exited, or was not ready within `serve.startup_timeout_s`.
    """
    port = spec.port or free_port()
    _require_free(port)
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    spec.log.write_bytes(b"")
    flags = flags_of(spec)
    variables = variables_of(spec)
    choice = kernel_choice(spec)
    command = [
        str(spec.python),
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(spec.model_path),
        "--served-model-name",
        spec.name,
        "--host",
        HOST,
        "--port",
        str(port),
        *flags,
        *choice.flags,
    ]
    started = time.monotonic()
    process = processes.start(
        command, log=spec.log, env={**worker_environment(), **variables, **dict(choice.variables)}
    )
    try:
        base_url = f"http://{HOST}:{port}"
        _wait_until_ready(process, base_url, spec, started, on_wait)
        startup_s = time.monotonic() - started
        facts = parse_log(spec.log.read_text(encoding="utf-8", errors="replace"))
        mismatch = kernel_mismatch(asked_kernel(spec), facts.kernels)
        record = ServerRecord(
            version=_get_json(f"{base_url}/version").get("version"),
            flags=tuple(flags),
            environment={
                key: value
                for key, value in {**os.environ, **variables}.items()
                if key.startswith(RECORDED)
            },
            kernel_asked=asked_kernel(spec),
            max_model_len=_model_card(base_url).get("max_model_len"),
            kernels=facts.kernels,
            quantization=facts.quantization,
            weight_bytes=facts.weight_bytes,
            kv_cache_tokens=facts.kv_cache_tokens,
            max_concurrency=facts.max_concurrency,
            kv_cache_bytes=facts.kv_cache_bytes,
            graph_memory_bytes=facts.graph_memory_bytes,
            startup_s=startup_s,
            marks=(*facts.marks, *(mark for mark in (choice.mark, mismatch) if mark)),
        )
        gpus = spec.serve.tensor_parallel_size if spec.accelerator == "cuda" else 0
        yield RunningServer(base_url, spec.name, record, spec.log, process, gpus)
    finally:
        processes.stop(process)


def attach(url: str, *, model: str | None = None) -> RunningServer:
    """Use a server that someone else started; it is never stopped.

    Args:
        url: Root of the server, with or without `/v1`.
        model: Model to use; None takes the only one it serves.

    Raises:
        ServerError: It does not answer, or does not serve that model.
    """
    base_url = url.rstrip("/").removesuffix("/v1")
    cards = _models(base_url)
    names = [str(card.get("id")) for card in cards]
    if model is None and len(names) != 1:
        raise InputError(
            f"the server serves {len(names)} models",
            where=url,
            fix=f"choose one with --served-model: {', '.join(names)}",
        )
    name = model or names[0]
    if name not in names:
        raise InputError(
            f"the server does not serve {name!r}", where=url, fix=f"it serves: {', '.join(names)}"
        )
    try:
        version = _get_json(f"{base_url}/version").get("version")
    except ServerError:
        version = None  # not every OpenAI-compatible server has it
    record = ServerRecord(
        version=version,
        flags=(),
        max_model_len=cards[names.index(name)].get("max_model_len"),
        kernels=(),
        marks=("attached server: flags, kernel and memory are not known",),
    )
    return RunningServer(base_url, name, record)


def model_root(server: RunningServer) -> Path | None:
    """Return the folder a server loaded its model from, if it is on this machine."""
    for card in _models(server.base_url):
        if card.get("id") == server.model and card.get("root"):
            root = Path(str(card["root"]))
            return root.resolve() if root.is_dir() else None
    return None


def instance_of(server: RunningServer) -> str | None:
    """Return what tells this process of an attached server, and the model in it, from any other.

    A server that was started again may serve another checkpoint under the same name, so its start
    counts. None where it does not say when that was.
    """
    started = _STARTED.search(_get_text(f"{server.base_url}/metrics"))
    if started is None:
        return None
    roots = [str(c.get("root")) for c in _models(server.base_url) if c.get("id") == server.model]
    return hash_value([server.base_url, server.model, roots, server.record.version, started[1]])


# -------------------------------------------------------------------------- flags and environment


def asked_kernel(spec: ServerSpec) -> str:
    """Return the linear kernel family to ask vLLM for, "auto" where its own choice is right.

    Marlin, the default, is asked for where it is the kernel to want: W4A16 everywhere, and FP8 on
    GPUs without FP8 tensor cores. Asking for it with FP8 on Ada or Hopper would turn W8A8 into
    weight-only; INT8 W8A8 has no Marlin kernel.
    """
    wanted = spec.serve.kernel
    if spec.accelerator == "cpu" or spec.method is None:
        return "auto"
    if wanted != "marlin" or spec.method in WEIGHT_ONLY_METHODS:
        return wanted
    if spec.method == "fp8" and spec.compute_capability:
        major, minor = map(int, spec.compute_capability.split("."))
        return "marlin" if (major, minor) < FP8_CAPABILITY else "auto"
    return "auto"


def flags_of(spec: ServerSpec) -> list[str]:
    """Return vLLM's command-line flags, model, name and address left out."""
    settings = spec.serve
    # Sampling defaults of the checkpoint would differ between variants' folders.
    flags = ["--generation-config", "vllm"]
    if settings.max_model_len:
        flags += ["--max-model-len", str(settings.max_model_len)]
    if settings.max_num_seqs:
        flags += ["--max-num-seqs", str(settings.max_num_seqs)]
    if settings.enforce_eager:
        flags += ["--enforce-eager"]
    if spec.trust_remote_code:
        flags += ["--trust-remote-code"]
    if spec.accelerator == "cuda":
        flags += ["--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"]
    if settings.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    return flags + list(settings.args)


def kernel_choice(spec: ServerSpec) -> KernelChoice:
    """Return what asks for a variant's kernel, in the way of the environment's vLLM.

    It differs between the variants of a run by design, so it is kept apart from `flags_of` and
    `variables_of`, which must be the same for all.
    """
    kernel = asked_kernel(spec)
    return (
        KernelChoice() if kernel == "auto" else choose_kernel(kernel, installed_vllm(spec.python))
    )


def variables_of(spec: ServerSpec) -> dict[str, str]:
    """Return the environment variables a server is started with, the kernel's left out."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        # Offers POST /reset_prefix_cache, which the benchmark calls between cells.
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if spec.accelerator == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(spec.serve.kv_cache_gib)
    return {**variables, **spec.serve.env}


# --------------------------------------------------------------------------------- ports and HTTP


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InputError(
                f"port {port} cannot be used: {error.strerror}",
                where=f"{HOST}:{port}",
                fix="end the program that listens there, or leave --port out to take a free one",
            ) from None


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    base_url: str,
    spec: ServerSpec,
    started: float,
    on_wait: Callable[[float], None] | None,
) -> None:
    deadline = started + spec.serve.startup_timeout_s
    while True:
        if process.poll() is not None:
            raise _died(process.returncode, spec.log, "did not start")
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            pass
        if time.monotonic() > deadline:
            raise ServerError(
                f"the server was not ready within {spec.serve.startup_timeout_s:g} s",
                where=spec.log,
                detail=processes.tail(spec.log, TAIL_LINES),
                fix="raise serve.startup_timeout_s in the recipe, or see the log",
            )
        if on_wait:
            on_wait(time.monotonic() - started)
        time.sleep(POLL_S)


def _died(code: int, log: Path, verb: str) -> ServerError:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    reason = failure_reason(text)
    advice = advice_on(reason) if reason else None
    plainly = advice.plainly if advice else None
    said = plainly or reason
    return ServerError(
        f"the server {verb} (exit code {code})" + (f": {said}" if said else ""),
        where=log,
        detail=(reason if plainly else None) if reason else processes.tail(log, TAIL_LINES),
        fix=advice.fix if advice else None,
    )


def _models(base_url: str) -> list[dict[str, Any]]:
    return list(_get_json(f"{base_url}/v1/models").get("data", []))


def _model_card(base_url: str) -> dict[str, Any]:
    cards = _models(base_url)
    return cards[0] if cards else {}


def _get_text(url: str) -> str:
    """Return a page's text, empty where there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return str(reply.read().decode(errors="replace"))
    except (urllib.error.URLError, OSError):
        return ""


def _get_json(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            value = json.load(reply)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ServerError(
            f"the server does not answer: {error}",
            where=url,
            fix="check that it runs and that the address is right",
        ) from None
    return value if isinstance(value, dict) else {}
