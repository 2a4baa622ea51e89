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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qkit.errors import InputError, nearest
from qkit.measurements import CalibrationRecord
from qkit.quantize.calibration_rows import Row, load_rows
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
    column = _choose_column(rows, config)
    tokenizer = _load_tokenizer(tokenizer_path)
    order = list(range(len(rows)))
    random.Random(config.seed).shuffle(order)

    needed = config.samples * config.seq_len
    ids: list[int] = []
    read = skipped = 0
    for start in range(0, len(order), BATCH_ROWS):
        batch = [rows[index] for index in order[start : start + BATCH_ROWS]]
        texts = [_render(row, column, tokenizer) for row in batch]
        wanted = [text for text in texts if text is not None and text.strip()]
        read += len(batch)
        skipped += len(batch) - len(wanted)
        # A rendered chat holds its special tokens as text; the tokenizer must not add others.
        for encoded in _encode(tokenizer, wanted, add_special_tokens=column not in _CHAT_COLUMNS):
            ids += encoded
        if len(ids) >= needed:
            break
    samples = list(_pack(ids[:needed], config.seq_len))
    if not samples:
        raise InputError(
            f"the calibration data holds {len(ids)} tokens in {read} rows ({skipped} of them"
            f" without text); at least {MIN_TOKENS} are needed",
            where=config.source,
            fix="give more text",
        )
    return CalibrationRecord(
        source=config.source,
        tokens_hash=_write(samples, out),
        requested_samples=config.samples,
        used_samples=len(samples),
        seq_len=config.seq_len,
        total_tokens=sum(map(len, samples)),
        rows_read=read,
        rows_skipped=skipped,
        seed=config.seed,
    )


_CHAT_COLUMNS = ("messages", "conversations")


def _pack(ids: Sequence[int], seq_len: int) -> Iterator[list[int]]:
    for start in range(0, len(ids), seq_len):
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


def _choose_column(rows: Sequence[Row], config: Calibration) -> str | None:
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


def _render(row: Row, column: str | None, tokenizer: Any) -> str | None:
    """Return a row's text, None if it has none."""
    if isinstance(row.value, str) or column is None:
        if not isinstance(row.value, str):
            raise InputError("some calibration rows are texts and this one is not", where=row.where)
        return row.value
    value = row.value.get(column)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return _render_chat(value, row.where, tokenizer) if value else None
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
