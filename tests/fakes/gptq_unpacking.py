"""A worker that loads a GPTQ checkpoint twice: by GPTQModel and by our own unpacking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkit.protocol import QuantizeRequest


@dataclass(frozen=True)
class Request:
    request: QuantizeRequest


@dataclass(frozen=True)
class Result:
    difference: float
    spread: float


REQUEST = Request
PACKAGES = ("gptqmodel",)


def compare(request: Request, progress: Any) -> Result:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    from qkit.quantize.backend_autogptq import _unpack
    from qkit.quantize.backend_shared import load_unpacked

    path = Path(request.request.out_path)
    ids = torch.arange(200).unsqueeze(0)
    theirs = GPTQModel.load(str(path), device="cpu", backend=BACKEND.GPTQ_TORCH).model
    ours = load_unpacked(path, replace(request.request, device="cpu"), _unpack)
    with torch.inference_mode():
        expected = theirs.float()(ids).logits[0]
        found = ours.float()(ids).logits[0]
    return Result(float((expected - found).square().mean().sqrt()), float(expected.std()))
