"""Say before anything is loaded whether a checkpoint can be quantized as asked.

Everything a person can have got wrong about the source is found here, from what
`inspect_checkpoint` read. Standard library only.
"""

from __future__ import annotations

import re
from typing import Any

from qkit.errors import InputError, nearest
from qkit.quantize.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    inspect_checkpoint,
    quantized_layers,
    split_bytes,
)
from qkit.quantize.schemes import FP8_BLOCK, GROUP_SIZES, GROUPED_METHODS, is_ignored

__all__ = [
    "Checkpoint",
    "check_blocks",
    "check_group_size",
    "check_ignore",
    "check_source",
    "check_variant",
    "inspect_checkpoint",
    "quantized_layers",
    "split_bytes",
]

#: Architectures whose quantized variants are tried end to end in the tests.
SUPPORTED_ARCHITECTURES = ("Qwen2ForCausalLM",)
SUPPORTED_DTYPES = ("BF16", "F16")


def check_variant(checkpoint: Checkpoint, variant: Any) -> None:
    """Run every check of a source and what is asked of it.

    Args:
        checkpoint: The source.
        variant: Anything with `method`, `weight_bits`, `group_size`, `scales`, `actorder` and
            `ignore` (a recipe's Variant or a worker's request).

    Raises:
        InputError: The first thing that is wrong.
    """
    check_source(checkpoint)
    check_ignore(checkpoint, variant)
    check_group_size(checkpoint, variant)
    check_blocks(checkpoint, variant)
    if variant.method in ("gptq", "smoothquant") and variant.actorder == "group":
        raise InputError(
            "actorder 'group' was removed from llm-compressor",
            fix="use actorder: static (a little less accurate than group was, no cost when"
            " served) or null",
        )


def check_source(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that cannot be the source of a variant.

    Raises:
        InputError: It is quantized already, of an architecture qkit does not know, not in 16 bits,
            or has no tokenizer.
    """
    where = checkpoint.path
    if checkpoint.quantization is not None:
        raise InputError(
            f"{where.name!r} is quantized already: {checkpoint.quantization}",
            where=where / CONFIG_FILE,
            fix="give the original BF16 or FP16 checkpoint",
        )
    if checkpoint.architecture not in SUPPORTED_ARCHITECTURES:
        raise InputError(
            f"{checkpoint.architecture} is not an architecture qkit can quantize",
            where=where / CONFIG_FILE,
            fix=f"supported: {', '.join(SUPPORTED_ARCHITECTURES)} (Qwen2 and Qwen2.5 text models)",
        )
    if checkpoint.dtype not in SUPPORTED_DTYPES:
        raise InputError(
            f"the weights are {checkpoint.dtype}; qkit quantizes from 16 bits",
            where=where,
            fix="save the checkpoint in bfloat16 first; the baseline is then that file too",
        )
    tokenizer = any((where / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    if checkpoint.weights_stored and not tokenizer:
        raise InputError(
            "the checkpoint has no tokenizer (tokenizer.json, or vocab.json with merges.txt)",
            where=where,
            fix="copy the tokenizer's files of the model into the folder",
        )


def check_group_size(checkpoint: Checkpoint, variant: Any) -> None:
    """Refuse a group size that does not divide the inputs of every layer to be quantized.

    Args:
        checkpoint: The source.
        variant: Anything with `method`, `weight_bits`, `group_size` and `ignore` (a recipe's
            Variant or a worker's request).

    Raises:
        InputError: Names the first layers and a group size that fits them all.
    """
    if variant.method not in GROUPED_METHODS or variant.weight_bits == 8:
        return
    targets = [lin for lin in checkpoint.linears if not is_ignored(lin.name, variant.ignore)]
    wrong = [lin for lin in targets if lin.in_features % variant.group_size]
    if not wrong:
        return
    fitting = [size for size in GROUP_SIZES if all(lin.in_features % size == 0 for lin in targets)]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise InputError(
        f"group size {variant.group_size} does not divide the {wrong[0].in_features} inputs of"
        f" {wrong[0].name}{more}",
        where=checkpoint.path,
        fix=f"use group_size {fitting[0]}, which divides the inputs of every layer"
        if fitting
        else f"no group size of {', '.join(map(str, GROUP_SIZES))} fits: add"
        f" 're:.*{wrong[0].name.rpartition('.')[2]}$' to ignore, or use fp8 or smoothquant",
    )


def check_blocks(checkpoint: Checkpoint, variant: Any) -> None:
    """Refuse block-wise FP8 where a layer is not made of whole blocks; vLLM has no kernel for it.

    Raises:
        InputError: Names the first such layer.
    """
    if variant.method != "fp8" or variant.scales != "block":
        return
    rows, columns = FP8_BLOCK
    for lin in checkpoint.linears:
        whole = lin.out_features % rows == 0 and lin.in_features % columns == 0
        if not whole and not is_ignored(lin.name, variant.ignore):
            raise InputError(
                f"{lin.name} is {lin.out_features} x {lin.in_features}, not whole blocks of"
                f" {rows} x {columns}",
                where=checkpoint.path,
                fix="use scales: dynamic (one scale a row), or add the layer to ignore",
            )


def check_ignore(checkpoint: Checkpoint, variant: Any) -> None:
    """Refuse an ignore pattern that names no Linear layer, and one list that names them all.

    Raises:
        InputError: With the nearest layer's name.
    """
    names = checkpoint.linear_names
    for pattern in variant.ignore:
        _check_pattern(checkpoint, pattern)
        if not any(is_ignored(name, (pattern,)) for name in names):
            hint = nearest(pattern, names) if not pattern.startswith("re:") else ""
            raise InputError(
                f"ignore names {pattern!r}, which is no Linear layer of the model{hint}",
                where=checkpoint.path,
                fix="give a layer's full name, or a pattern such as 're:.*down_proj$'",
            )
    if all(is_ignored(name, variant.ignore) for name in names):
        raise InputError(
            "ignore names every Linear layer: nothing would be quantized",
            where=checkpoint.path,
            fix="leave layers to quantize; the default is ignore: [lm_head]",
        )


def _check_pattern(checkpoint: Checkpoint, pattern: str) -> None:
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise InputError(
            f"ignore: {pattern!r} is not a regular expression: {error}", where=checkpoint.path
        ) from error
