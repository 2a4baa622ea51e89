"""Quantize with GPTQModel: GPTQ in GPTQ's own format, AWQ in AutoAWQ's GEMM format.

Runs inside the gptqmodel environment (GPTQModel 7.6). GPTQModel is AutoGPTQ's maintained successor.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from qkit.errors import MeasurementError
from qkit.protocol import QuantizeRequest, QuantizeResult
from qkit.quantize.backend_shared import (
    ProgressCallback,
    choose_device,
    layer_progress,
    module_names,
    read_calibration,
    result_of,
    skipped_mappings,
    torch_dtype_of,
    write_quantization_config,
)
from qkit.quantize.checkpoint import CONFIG_FILE
from qkit.quantize.source_files import keep_source_files

REQUEST = QuantizeRequest
PACKAGES = ("gptqmodel", "torch", "transformers")
MAX_SHARD_SIZE = "5GB"
#: Finished layers wait here, inside the variant's folder, until they are saved.
OFFLOAD_FOLDER = "offload"
#: Repeats config.json, and a table that is in the worker's log; neither belongs into a checkpoint.
SIDE_FILES = ("quantize_config.json", "quant_log.csv")


def run(request: QuantizeRequest, progress: ProgressCallback) -> QuantizeResult:
    """Quantize one checkpoint with GPTQModel and save it to `request.out_path`.

    Raises:
        EnvironmentMissingError: CUDA is asked for and torch sees no GPU.
        MeasurementError: Samples were dropped, a layer was left out, or the result is broken.
    """
    device = choose_device(request.device)
    import transformers
    from gptqmodel import GPTQModel
    from gptqmodel.looper import loop_processor

    from qkit.quantize.backend_check import check_saved, source_reference

    transformers.set_seed(request.seed)
    source, out, trust = Path(request.model_path), Path(request.out_path), request.trust_remote_code
    samples = read_calibration(request)

    progress("load", 0, 1)
    reference = source_reference(source, device=request.device, trust_remote_code=trust)
    offload = out / OFFLOAD_FOLDER
    offload.mkdir(parents=True)
    # It would make a folder "logs" in the current one.
    loop_processor._PROJECT_LOG_DIR = offload
    wrapper = GPTQModel.load(
        str(source),
        _config(request, device, offload),
        dtype=torch_dtype_of(source),
        trust_remote_code=trust,
    )
    progress("load", 1, 1)

    with layer_progress(wrapper.model.model.layers, progress):
        log = wrapper.quantize(
            [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples],
            calibration_sort=None,
            calibration_data_min_length=0,
            backend=_kernel(request),
        )
    rows = [row for part in log.values() for row in part]
    _check_samples(rows, samples)
    modules = module_names(wrapper.model)

    progress("save", 0, 1)
    wrapper.save(str(out), max_shard_size=MAX_SHARD_SIZE)
    shutil.rmtree(offload)
    for name in SIDE_FILES:
        (out / name).unlink(missing_ok=True)
    keep_source_files(source, out)
    _tidy_config(out)
    progress("save", 1, 1)

    progress("check", 0, 1)
    report = check_saved(
        reference,
        out,
        device=request.device,
        trust_remote_code=trust,
        load=lambda path: (
            GPTQModel.load(
                str(path), device=device, backend=_kernel(request), trust_remote_code=trust
            ).model
        ),
    )
    progress("check", 1, 1)
    skipped = skipped_mappings(source) if request.method == "awq" else ()
    return result_of(request, modules, report, skipped=skipped, notes=_notes(request, rows))


def _config(request: QuantizeRequest, device: str, offload: Path) -> Any:
    from gptqmodel import QuantizeConfig

    grouped, static = request.weight_bits == 4, request.actorder == "static"
    general = {
        "bits": request.weight_bits,
        # One scale a row.
        "group_size": request.group_size if grouped else -1,
        "sym": request.symmetric,
        "device": device,
        "offload_to_disk_path": str(offload),
        # It would round a layer to the nearest, silently, for want of calibration data.
        "fallback": None,
    }
    if request.method == "awq":
        return QuantizeConfig(**general, method="awq", format="gemm", desc_act=False)
    return QuantizeConfig(
        **general,
        method="gptq",
        format="gptq",
        damp_percent=request.dampening_frac,
        # The order of activations within groups and of whole groups, which costs nothing when
        # served. Where a row is one group, any order does.
        act_group_aware=static and grouped,
        desc_act=static and not grouped,
    )


def _kernel(request: QuantizeRequest) -> Any:
    """Return the kernels that pack and run on every device."""
    from gptqmodel import BACKEND

    return BACKEND.AWQ_TORCH if request.method == "awq" else BACKEND.GPTQ_TORCH


def _check_samples(rows: list[dict[str, Any]], samples: list[list[int]]) -> None:
    """Check by GPTQModel's own count that every layer saw every token."""
    tokens = sum(map(len, samples))
    for row in rows:
        if int(row["samples"]) != tokens:
            raise MeasurementError(
                f"GPTQModel calibrated layer {row['layer']} {row['module']} with {row['samples']}"
                f" of {tokens} tokens"
            )


def _tidy_config(out: Path) -> None:
    """Leave out of the configuration what is no setting of the checkpoint.

    That is the folder of this run, and an order of columns that leaves no trace: where a row is one
    group, there is nothing to reorder when it is served.
    """
    config = json.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
    settings = config["quantization_config"]
    meta = {k: v for k, v in (settings.get("meta") or {}).items() if "offload" not in k}
    write_quantization_config(out, {**settings, "meta": meta, "desc_act": False})


def _notes(request: QuantizeRequest, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    if request.method == "awq":
        return ()
    notes = []
    if request.actorder == "static" and request.weight_bits == 4:
        notes.append("actorder static is GPTQModel's group-aware reordering (act_group_aware)")
    notes += [
        f"GPTQModel used a damping of {float(row['damp']):g} instead of"
        f" {request.dampening_frac:g} for model.layers.{row['layer']}.{row['module']}"
        for row in rows
        # Its log rounds to five places.
        if abs(float(row["damp"]) - request.dampening_frac) > 1e-5
    ]
    return tuple(notes)
