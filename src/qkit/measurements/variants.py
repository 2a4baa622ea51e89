"""What a checkpoint is and how it was made."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from qkit.measurements.base import SCHEMA_VERSION, Stored


class CalibrationRecord(Stored):
    """What a variant was calibrated with."""

    source: str
    #: SHA-256 of the token ids, in order.
    tokens_hash: str
    requested_samples: int
    used_samples: int
    seq_len: int
    total_tokens: int
    #: Rows in the seed's order, up to the one that made the tokens enough.
    rows_read: int
    #: Those of them without text.
    rows_skipped: int
    seed: int
    #: Rows in the whole source.
    rows_there: int | None = None
    #: Rows with tokens in the samples.
    rows_used: int | None = None
    #: Rows of which tokens were left out: the surplus of the last one.
    rows_truncated: int | None = None
    tokens_left_out: int | None = None
    #: Share of the letters by Unicode script, the largest first, chat templates not counted.
    scripts: dict[str, float] = Field(default_factory=dict)
    #: Why the data may not be right for the model; None where nothing is known against it.
    warning: str | None = None


class VariantRecord(Stored):
    """`qkit.json` in a variant's folder: what it is and how it was made."""

    schema_version: int = SCHEMA_VERSION
    #: Key of the inputs: source hash, method settings, calibration hash, backend's pins.
    key: str
    #: Hash of this folder's weights and configuration.
    content_hash: str
    source: str
    source_hash: str
    method: str
    scheme: str
    backend: str
    versions: dict[str, str]
    calibration: CalibrationRecord | None
    settings: dict[str, str | int | float | bool | tuple[str, ...] | None]
    ignored_modules: tuple[str, ...]
    skipped_mappings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    #: What was checked after saving.
    load_check: str
    #: Mean divergence from the source's next-token distributions on a short text, in nats.
    mean_kl: float
    #: Share of that text's positions with the source's most likely token.
    top1_agreement: float
    quantized_bytes: int
    unquantized_bytes: int
    weight_bytes: int
    seed: int
    duration_s: float
    peak_memory_bytes: int
    created: str


class Subject(Stored):
    """A checkpoint to be served and measured, stored as `subject.json`.

    Attributes:
        label: Name of its row.
        path: Checkpoint folder; the tokenizer's for a server that someone else started.
        method: How it was quantized; None for a 16-bit checkpoint.
        scheme: For example "BF16" or "W4A16 sym g128".
        content_hash: Hash of weights, configuration and tokenizer.
        record: qkit.json, where qkit made it.
        weight_bytes: Bytes of all tensors.
        quantized_bytes: Bytes of quantized layers, scales included.
        unquantized_bytes: The rest.
    """

    label: str
    path: Path
    method: str | None
    scheme: str
    content_hash: str
    record: VariantRecord | None = None
    weight_bytes: int | None = None
    quantized_bytes: int | None = None
    unquantized_bytes: int | None = None
    #: What `qkit plan` predicts for `weight_bytes`; None for checkpoints that are not planned.
    predicted_bytes: int | None = None
    #: Weights read for one decoding step.
    read_bytes: int | None = None
    #: KV-cache bytes of one token on all cards together, as the checkpoint itself asks for.
    kv_bytes_per_token: int | None = None
