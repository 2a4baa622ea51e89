"""What `qkit plan` says about calibration data: a look at the first rows of a local source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qkit.errors import InputError
from qkit.quantize.calibration import choose_column, plain_text
from qkit.quantize.calibration_rows import sample_rows
from qkit.quantize.calibration_scripts import (
    mix_label,
    one_script_warning,
    script_mix,
    tokenizer_scripts,
)
from qkit.quantize.checkpoint import Checkpoint
from qkit.quantize.methods import needs_calibration
from qkit.quantize.plan_checks import Check
from qkit.quantize.resources import ToMake
from qkit.recipe import Calibration

NAME = "calibration"
#: Read for the look. Half a second is enough for as much, whatever the format.
SAMPLE_BYTES = 1 << 20


def calibration_checks(checkpoint: Checkpoint, to_make: Sequence[ToMake]) -> list[Check]:
    """Look at every source of calibration data that is needed, once."""
    needed = dict.fromkeys(item.calibration for item in to_make if needs_calibration(item.variant))
    checks: list[Check] = []
    for calibration in needed:
        try:
            checks += _look(calibration, checkpoint)
        except InputError as error:
            checks.append(Check(NAME, "problem", f"{error.what} ({error.where})", error.fix))
    return checks


def _look(calibration: Calibration, checkpoint: Checkpoint) -> list[Check]:
    tokens = calibration.samples * calibration.seq_len
    asked = f"{calibration.samples:,} x {calibration.seq_len:,} tokens of {calibration.source}"
    found = sample_rows(calibration.source, split=calibration.split, max_bytes=SAMPLE_BYTES)
    if found is None:
        local = Path(calibration.source).expanduser().exists()
        why = (
            "it is looked into when a variant is made"
            if local
            else f"from the hub (split {calibration.split}), which planning does not ask"
        )
        return [Check(NAME, "ok", f"{asked}: {why}")]
    rows, whole = found
    column = choose_column(rows, calibration)
    characters = Counter[str]()
    size = blank = 0
    for row in rows:
        text = plain_text(row, column)
        characters.update(text)
        size += len(text.encode(errors="replace"))
        blank += not text.strip()
    mix = script_mix(characters)
    which = f"{len(rows):,} rows" if whole else f"first {len(rows):,} rows"
    without = f", {blank:,} of them without text" if blank else ""
    checks = [Check(NAME, "ok", f"{asked}; {which}{without}: {mix_label(mix)}")]
    if whole and size < tokens:
        checks.append(
            Check(
                NAME,
                "note",
                f"too little text: {size:,} bytes, and a token takes one at least",
                "give more text, or ask for fewer or shorter samples",
            )
        )
    if warning := one_script_warning(mix, tokenizer_scripts(checkpoint.path)):
        checks.append(Check(NAME, "note", warning, "add text in the languages that will be served"))
    return checks
