"""Turn calibration data into token ids: rendered, shuffled, packed, recorded.

Rows are tokenized and packed to exactly `seq_len` tokens a sample, so no row is dropped for being
short and none is cut for being long, except the surplus of the last one. All of it happens before
a model is loaded, without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkit.errors import InputError, nearest
from qkit.measurements import CalibrationRecord
from qkit.quantize.calibration_rows import Row, load_rows
from qkit.quantize.calibration_scripts import one_script_warning, script_mix, tokenizer_scripts
from qkit.recipe import Calibration

#: Columns looked for when the recipe names none, in this order.
KNOWN_COLUMNS = ("messages", "conversations", "text")
#: A last sample shorter than this says nothing about activations.
MIN_TOKENS = 8
BATCH_ROWS = 64
#: ShareGPT's names of who speaks, and the chat templates'.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}


def prepare_calibration(
    config: Calibration, *, tokenizer_path: Path, out: Path
) -> CalibrationRecord:
    """Write calibration samples as JSON Lines, one list of token ids a line.

    The file is there whole or not at all. The same data, tokenizer and seed give the same bytes.
    Where the data is too little, there are fewer samples than asked for and the last one is
    shorter; the record says how many.

    Raises:
        InputError: The data or the tokenizer cannot be used; names the file and line.
        HubUnreachableError: The data set has to come from the hub and does not.
    """
    rows = load_rows(config.source, split=config.split)
    column = choose_column(rows, config)
    tokenizer = _load_tokenizer(tokenizer_path)
    taken = _take(rows, column, tokenizer, config)
    samples = list(_pack(taken.ids, config.samples * config.seq_len, config.seq_len))
    if not samples:
        raise InputError(
            f"the calibration data holds {len(taken.ids)} tokens in {taken.rows_read} rows"
            f" ({taken.skipped} of them without text); at least {MIN_TOKENS} are needed",
            where=config.source,
            fix="give more text",
        )
    kept = sum(map(len, samples))
    starts = [0, *taken.ends[:-1]]
    scripts = script_mix(taken.characters)
    return CalibrationRecord(
        source=config.source,
        tokens_hash=_write(samples, out),
        requested_samples=config.samples,
        used_samples=len(samples),
        seq_len=config.seq_len,
        total_tokens=kept,
        rows_read=taken.rows_read,
        rows_skipped=taken.skipped,
        rows_there=len(rows),
        rows_used=sum(start < kept for start in starts),
        rows_truncated=sum(end > kept for end in taken.ends),
        tokens_left_out=len(taken.ids) - kept,
        scripts=scripts,
        warning=one_script_warning(scripts, tokenizer_scripts(tokenizer_path)),
        seed=config.seed,
    )


def check_calibration(config: Calibration, tokenizer_path: Path) -> None:
    """Prepare calibration samples of a local source and keep none of them.

    What is wrong with the data is found before the first of several variants is made; it takes
    seconds. A hub data set is left to the variant that needs it: its failure costs the others
    nothing.

    Raises:
        InputError: As `prepare_calibration`.
    """
    if Path(config.source).expanduser().exists():
        with tempfile.TemporaryDirectory() as folder:
            prepare_calibration(config, tokenizer_path=tokenizer_path, out=Path(folder) / "samples")


@dataclass
class _Taken:
    """Tokens of the rows in the seed's order, up to the row that makes them enough.

    Attributes:
        ids: Token ids, end to end.
        ends: Position after each row's last token.
        skipped: Rows without text among those read.
        characters: How often each character occurs in the rows' own text, before the template.
    """

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    skipped: int = 0
    characters: Counter[str] = field(default_factory=Counter)

    @property
    def rows_read(self) -> int:
        """Rows with text and without."""
        return len(self.ends) + self.skipped


def _take(rows: Sequence[Row], column: str | None, tokenizer: Any, config: Calibration) -> _Taken:
    order = list(range(len(rows)))
    random.Random(config.seed).shuffle(order)
    needed = config.samples * config.seq_len
    taken = _Taken()
    for start in range(0, len(order), BATCH_ROWS):
        batch = [rows[index] for index in order[start : start + BATCH_ROWS]]
        texts = [_render(row, column, tokenizer) for row in batch]
        wanted = [text for text in texts if text.strip()]
        # A rendered chat holds its special tokens as text; the tokenizer must not add others.
        special = column not in _CHAT_COLUMNS
        encoded = iter(_encode(tokenizer, wanted, add_special_tokens=special))
        for row, text in zip(batch, texts, strict=True):
            if len(taken.ids) >= needed:
                return taken
            if not text.strip():
                taken.skipped += 1
                continue
            taken.ids += next(encoded)
            taken.ends.append(len(taken.ids))
            taken.characters.update(plain_text(row, column))
    return taken


_CHAT_COLUMNS = ("messages", "conversations")


def _pack(ids: Sequence[int], needed: int, seq_len: int) -> Iterator[list[int]]:
    for start in range(0, min(needed, len(ids)), seq_len):
        sample = list(ids[start : start + seq_len])
        if len(sample) >= min(seq_len, MIN_TOKENS):
            yield sample


def _write(samples: list[list[int]], out: Path) -> str:
    """Write the samples and return the SHA-256 of the file."""
    data = "".join(json.dumps(sample, separators=(",", ":")) + "\n" for sample in samples).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(out)
    return hashlib.sha256(data).hexdigest()


def choose_column(rows: Sequence[Row], config: Calibration) -> str | None:
    """Return the column to read, None for rows that are texts.

    Raises:
        InputError: No row has it; the message lists the columns there are.
    """
    first = rows[0]
    if isinstance(first.value, str):
        if config.column is not None:
            raise InputError(
                f"calibration.column is {config.column!r}, but the rows are plain texts",
                where=first.where,
                fix="leave calibration.column out",
            )
        return None
    columns = list(first.value)
    wanted = KNOWN_COLUMNS if config.column is None else (config.column,)
    for name in wanted:
        if name in columns:
            return name
    if config.column is None:
        what = f"none of the columns {', '.join(KNOWN_COLUMNS)} is in the calibration data"
    else:
        hint = nearest(config.column, columns)
        what = f"the calibration data has no column {config.column!r}{hint}"
    raise InputError(
        what,
        where=first.where,
        detail=f"columns there: {', '.join(map(str, columns))}",
        fix="set calibration.column to one of them",
    )


def plain_text(row: Row, column: str | None) -> str:
    """Return a row's own text, a chat's turns one a line; empty if it has none.

    Raises:
        InputError: The row or its column holds something else.
    """
    value = _value(row, column)
    if not isinstance(value, list):
        return value
    return "\n".join(_message(turn, row.where)["content"] for turn in value)


def _render(row: Row, column: str | None, tokenizer: Any) -> str:
    """Return a row's text as the model reads it: chats through the template, texts as they are."""
    value = _value(row, column)
    text = _render_chat(value, row.where, tokenizer) if isinstance(value, list) else value
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds half a character (\\u{ord(text[error.start]):04x}), which no"
            " tokenizer takes",
            where=row.where,
            fix="write the row again from its original, or leave it out",
        ) from error
    return text


def _value(row: Row, column: str | None) -> str | list[Any]:
    """Return a row's text or list of messages; an empty text if it has none."""
    if isinstance(row.value, str) or column is None:
        if not isinstance(row.value, str):
            raise InputError("some calibration rows are texts and this one is not", where=row.where)
        return row.value
    value = row.value.get(column)
    if not value and (value is None or isinstance(value, (str, list))):
        return ""
    if isinstance(value, (str, list)):
        return value
    raise InputError(
        f"column {column!r} holds {type(value).__name__}, not a text or a list of messages",
        where=row.where,
        fix="set calibration.column to a column with text or chat messages",
    )


def _render_chat(turns: list[Any], where: str, tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the calibration rows are chats and the checkpoint's tokenizer has no chat template",
            where=where,
            fix="give rows of plain text, or a checkpoint with a chat template",
        )
    messages = [_message(turn, where) for turn in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    # A template is the checkpoint's own program and raises what it likes.
    except Exception as error:
        raise InputError(
            f"the chat template refuses this row: {error}", where=where, fix="correct the row"
        ) from error


def _message(turn: Any, where: str) -> dict[str, str]:
    """Return one turn as role and content, from OpenAI's or ShareGPT's keys."""
    if not isinstance(turn, dict):
        raise InputError(f"a chat turn is {type(turn).__name__}, not an object", where=where)
    speaker = turn.get("role", turn.get("from"))
    role = ROLES.get(str(speaker))
    if role is None:
        raise InputError(
            f"a chat turn's role is {speaker!r}", where=where, fix=f"known: {', '.join(ROLES)}"
        )
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise InputError(
            "a chat turn has no text in 'content' (or 'value')",
            where=where,
            fix="every turn needs role and content, or from and value",
        )
    return {"role": role, "content": content}


def _load_tokenizer(path: Path) -> Any:
    # The core has no torch on purpose; transformers would warn about it when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Imported when needed: it takes a second, and most commands never tokenize.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        # Said outright: left open, transformers asks on the terminal and waits.
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # transformers raises anything from OSError to a Rust panic's Exception for a broken file.
    except Exception as error:
        raise InputError(
            f"the checkpoint's tokenizer cannot be loaded: {error}",
            where=path,
            fix="copy the model's tokenizer files into the folder again",
        ) from error


def _encode(tokenizer: Any, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        verbose=False,
    )
    return [list(map(int, ids)) for ids in encoded["input_ids"]]
