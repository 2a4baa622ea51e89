"""Which fields forbid a comparison, and how they are named."""

from __future__ import annotations

import pytest
from golden import matrix_input as given

from qkit.evaluate.comparable import (
    bench_differences,
    flag_groups,
    hardware_differences,
    server_differences,
)


def test_flags_are_grouped_with_their_values() -> None:
    flags = ("--max-model-len=4096", "--seed", "-1", "--enforce-eager", "--stop", "a", "b")
    assert flag_groups(flags) == [
        "--max-model-len 4096",
        "--seed -1",
        "--enforce-eager",
        "--stop a b",
    ]


def test_flags_may_come_in_another_order_and_spelling() -> None:
    other = given.SERVER.model_copy(
        update={"flags": ("--gpu-memory-utilization=0.9", "--max-model-len=4096")}
    )
    assert server_differences(given.SERVER, other) == ()


def test_only_the_flags_that_differ_are_named() -> None:
    other = given.SERVER.model_copy(update={"flags": (*given.SERVER.flags, "--enforce-eager")})
    assert server_differences(given.SERVER, other) == (
        "server flags --enforce-eager vs none (baseline)",
    )


def test_what_follows_from_the_weights_may_differ() -> None:
    other = given.SERVER.model_copy(
        update={
            "kernels": ("MarlinLinearKernel",),
            "weight_bytes": 1,
            "kv_cache_tokens": 2,
            "max_concurrency": 3.0,
            "quantization": "compressed-tensors",
            "startup_s": 99.0,
            "marks": ("noted",),
        }
    )
    assert server_differences(given.SERVER, other) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"count": 2}, ("hardware count 2 vs 1 (baseline)",)),
        ({"driver": None}, ("hardware driver none vs 580.95.05 (baseline)",)),
        ({"memory_bytes": given.HARDWARE.memory_bytes + 4096}, ()),
        (
            {"memory_bytes": 40 * given.GIB},
            (f"hardware memory_bytes {40 * given.GIB} vs {80 * given.GIB} (baseline)",),
        ),
    ],
)
def test_machines(change: dict[str, object], expected: tuple[str, ...]) -> None:
    other = given.HARDWARE.model_copy(update=change)
    assert hardware_differences(given.HARDWARE, other) == expected


def test_hashes_are_compared_whole_and_shown_short() -> None:
    first = given.sweep(given.BF16_FIGURES, prompt_hash="sha256:" + "a" * 63 + "1")
    second = given.sweep(given.BF16_FIGURES, prompt_hash="sha256:" + "a" * 63 + "2")
    assert bench_differences(first, second) == (
        "prompt set aaaaaaaaaaaa vs aaaaaaaaaaaa (baseline)",
    )
    assert bench_differences(first, first) == ()
