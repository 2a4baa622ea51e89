"""Make one variant: check, calibrate, run the worker, verify, and only then put it in place.

A variant is written to a hidden sibling folder and renamed when it is whole and proven, so a run
that is killed at any moment leaves nothing that passes for finished, and an older variant stays
until the new one takes its place.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from qkit import __version__
from qkit.environments import variables_of
from qkit.hashing import hash_checkpoint
from qkit.measurements import CalibrationRecord, VariantRecord
from qkit.processes import is_running_since
from qkit.protocol import Progress, QuantizeResult, write_json
from qkit.quantize.backends import BACKENDS, check_backend
from qkit.quantize.calibration import prepare_calibration
from qkit.quantize.methods import (
    build_request,
    needs_calibration,
    scheme_label,
    settings_of,
)
from qkit.quantize.preflight import check_variant, inspect_checkpoint
from qkit.quantize.verify import verify_variant
from qkit.quantize.verify_gptq_awq import verify_packed_variant
from qkit.recipe import Calibration, Variant
from qkit.store import VARIANT_FILE
from qkit.worker import run_worker

#: How a variant is proven, by the format its backend writes.
VERIFICATIONS = {"compressed-tensors": verify_variant, "packed": verify_packed_variant}
CALIBRATION_FILE = "calibration.jsonl"
_READABLE = 0o444
#: Everything a worker reads is on this machine; a look at the hub would only wait for a time-out.
WORKER_ENV = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def quantize_variant(
    *,
    variant: Variant,
    calibration: Calibration,
    source: Path,
    source_hash: str,
    out: Path,
    work: Path,
    python: Path,
    accelerator: str,
    key: str,
    trust_remote_code: bool,
    on_progress: Callable[[Progress], None] | None = None,
) -> VariantRecord:
    """Make a variant of `source` in `out` and return its record.

    Args:
        variant: What to make.
        calibration: Data and seed; the data is not read for a data-free method.
        source: Source checkpoint folder.
        source_hash: Its content hash, for the record.
        out: Folder of the variant; an older one is replaced when the new one is finished.
        work: Folder for the calibration file, the worker's request, result and log.
        python: Interpreter of the environment of the variant's backend.
        accelerator: "cpu" or "cuda".
        key: Key of all inputs, for the record.
        trust_remote_code: Whether the checkpoint's own Python code may run.
        on_progress: Called with each progress line.

    Raises:
        InputError: The checkpoint, the settings or the calibration data cannot be used; found
            before the worker is started.
        HubUnreachableError: The calibration data has to come from the hub and does not.
        WorkerError: The worker failed.
        MeasurementError: What it wrote is not what was asked for.
    """
    started = time.perf_counter()
    checkpoint = inspect_checkpoint(source)
    check_variant(checkpoint, variant)
    check_backend(checkpoint, variant, accelerator)
    backend = BACKENDS[variant.backend]
    work.mkdir(parents=True, exist_ok=True)
    tokens, samples = _calibrate(variant, calibration, source, work)

    out.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(out)
    partial = _sibling(out, "partial")
    try:
        request = build_request(
            variant,
            source=source.resolve(),
            out=partial.resolve(),
            calibration=tokens,
            seed=calibration.seed,
            device=accelerator,
            trust_remote_code=trust_remote_code,
        )
        done = run_worker(
            python,
            backend.entry,
            request,
            QuantizeResult,
            work,
            on_progress=on_progress,
            env={**WORKER_ENV, **variables_of(backend.environment)},
        )
        sizes = VERIFICATIONS[backend.storage](partial, checkpoint, variant)
        record = VariantRecord(
            key=key,
            content_hash=hash_checkpoint(partial),
            source=str(source),
            source_hash=source_hash,
            method=variant.method,
            scheme=scheme_label(variant),
            backend=variant.backend,
            versions={"qkit": __version__, **done.versions},
            calibration=samples,
            settings=dict(settings_of(variant)),
            ignored_modules=done.value.ignored_modules,
            skipped_mappings=done.value.skipped_mappings,
            notes=(*_shortage(samples), *done.value.notes),
            load_check=done.value.load_check,
            mean_kl=done.value.mean_kl,
            top1_agreement=done.value.top1_agreement,
            quantized_bytes=sizes.quantized_bytes,
            unquantized_bytes=sizes.unquantized_bytes,
            weight_bytes=sizes.weight_bytes,
            seed=calibration.seed,
            duration_s=time.perf_counter() - started,
            peak_memory_bytes=done.value.peak_memory_bytes,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_json(partial / VARIANT_FILE, record.model_dump(mode="json"))
        put_in_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return record


def remove_stale(out: Path) -> None:
    """Clear what killed runs left beside `out`, and undo a replacement that was cut in two."""
    for kind in ("partial", "old"):
        for path in sorted(out.parent.glob(f".{out.name}.{kind}-*")):
            if _is_in_use(path):
                continue
            if kind == "old" and not out.exists():
                path.rename(out)
            else:
                shutil.rmtree(path)


def put_in_place(partial: Path, out: Path) -> None:
    """Flush a finished folder to disk and rename it to `out`, replacing an older one."""
    for path in partial.rglob("*"):
        if path.is_file():
            # The safetensors library makes its files private; a server may be another user.
            path.chmod(path.stat().st_mode | _READABLE)
        _fsync(path)
    _fsync(partial)
    old = _sibling(out, "old")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    _fsync(out.parent)
    if old.exists():
        shutil.rmtree(old)


def _calibrate(
    variant: Variant, calibration: Calibration, source: Path, work: Path
) -> tuple[Path | None, CalibrationRecord | None]:
    if not needs_calibration(variant):
        return None, None
    path = (work / CALIBRATION_FILE).resolve()
    return path, prepare_calibration(calibration, tokenizer_path=source, out=path)


def _shortage(samples: CalibrationRecord | None) -> tuple[str, ...]:
    if samples is None or samples.total_tokens >= samples.requested_samples * samples.seq_len:
        return ()
    return (
        f"calibration data was short: {samples.used_samples} of {samples.requested_samples}"
        f" samples, {samples.total_tokens} tokens in all {samples.rows_read} rows",
    )


def _sibling(out: Path, kind: str) -> Path:
    """Return a hidden folder beside `out`, so that the rename stays on one file system."""
    return out.with_name(f".{out.name}.{kind}-{os.getpid()}")


def _is_in_use(path: Path) -> bool:
    """Tell whether the process that made a hidden folder, named in it, is at work on it."""
    pid = path.name.rpartition("-")[2]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    return is_running_since(int(pid), path.stat().st_mtime)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
