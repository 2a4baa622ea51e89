"""Base of all stored values, and the machine they were measured on."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


class Stored(BaseModel):
    """Base of every stored value: immutable, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Hardware(Stored):
    """The machine a measurement was made on."""

    accelerator: Literal["cpu", "cuda"]
    #: Name of the GPU, or of the CPU where there is none.
    name: str
    count: int = 1
    #: GPU memory, or the machine's where there is no GPU.
    memory_bytes: int
    cpu: str
    cpu_cores: int
    compute_capability: str | None = None
    driver: str | None = None
