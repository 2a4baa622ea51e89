"""What the llm-compressor worker takes from the library's log, and how it names a scheme."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qkit.quantize.backend_damping import DampingRetries
from qkit.quantize.backend_llmcompressor import _Messages
from qkit.quantize.backend_shared import scheme_name
from qkit.quantize.schemes import scheme_for


def message(level: str, text: str) -> Any:
    return SimpleNamespace(record={"level": SimpleNamespace(name=level), "message": text})


def collected(*messages: Any) -> _Messages:
    found = _Messages()
    for item in messages:
        found.take(item)
    return found


def test_skipped_mappings_name_the_layer_and_the_reason() -> None:
    grouped_query = (
        "Skipping model.layers.0.self_attn.v_proj for mapping AWQMapping(smooth_layer="
        "'re:.*v_proj$', balance_layers=['re:.*o_proj$'], activation_hook_target=None) because"
        " incompatible balance layers were found."
    )
    ignored = (
        "Skipping SmoothQuant for model.layers.1.input_layernorm because all layers in the"
        " mapping are in the ignore list"
    )
    found = collected(
        message("DEBUG", grouped_query),
        message("DEBUG", grouped_query),
        message("WARNING", ignored),
    )
    assert found.skipped == [
        "model.layers.0.self_attn.v_proj: its outputs are fewer than o_proj's inputs"
        " (grouped-query attention)",
        "model.layers.1.input_layernorm: all layers in the mapping are in the ignore list",
    ]
    assert found.warnings == []


def test_warnings_are_kept_once_and_chatter_is_not() -> None:
    fallback = "Hessian inversion failed for 1/14 modules (7.1%)."
    found = collected(
        message("WARNING", fallback),
        message("WARNING", fallback),
        message("METRIC", "error 35.00"),
        message("INFO", "Quantizing 1 module(s)"),
        message("WARNING", "No accelerator available! Compressing model on CPU instead"),
        message("WARNING", "2 mappings were skipped due to incompatible shapes. Set logging"),
    )
    assert found.warnings == [fallback]


@pytest.mark.parametrize(
    ("method", "symmetric", "name"),
    [
        ("awq", False, "W4A16_ASYM g64"),
        ("gptq", True, "W4A16 g64"),
        ("fp8", True, "FP8_DYNAMIC"),
        ("smoothquant", True, "W8A8"),
    ],
)
def test_schemes_in_the_library_s_spelling(method: str, symmetric: bool, name: str) -> None:
    scheme = scheme_for(method, group_size=64, symmetric=symmetric, actorder=None)
    assert scheme_name(scheme) == name


@pytest.mark.parametrize(
    ("method", "scales", "name"),
    [
        ("fp8", "static", "FP8"),
        ("fp8", "block", "FP8_BLOCK"),
        ("smoothquant", "static", "W8A8 static"),
    ],
)
def test_other_scales_in_the_library_s_spelling(method: str, scales: str, name: str) -> None:
    scheme = scheme_for(method, group_size=128, symmetric=True, actorder=None, scales=scales)
    assert scheme_name(scheme) == name


def test_damping_retries_are_told_once_for_each_damping() -> None:
    retries = DampingRetries(asked=0.001)
    assert retries.notes() == ()
    retries.add("a.q_proj", 0.1)
    retries.add("a.k_proj", 0.01)
    retries.add("b.q_proj", 0.1)
    assert retries.notes() == (
        "GPTQ used dampening_frac 0.01 instead of 0.001 for 1 layer whose Hessian was not positive"
        " definite: a.k_proj",
        "GPTQ used dampening_frac 0.1 instead of 0.001 for 2 layers whose Hessian was not positive"
        " definite: a.q_proj, b.q_proj",
    )
