"""Load a saved variant again and compare its next-token distributions with the source's.

Runs inside a backend's environment (torch and transformers), whatever the backend was.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkit.errors import MeasurementError
from qkit.quantize.checkpoint import CONFIG_FILE

#: A few hundred tokens of plain text, the same for every variant, so that figures compare.
CHECK_TEXT = """\
A kettle holds about a litre and a half of water. To boil it from room temperature takes roughly
half a million joules, most of which go into the water and some into the metal and the air around
it. A stove of two kilowatts therefore needs a little more than four minutes.

Question: Which of these is a prime number?
A. 21
B. 27
C. 29
D. 33
Answer: C

The river rises in the hills to the north, passes three villages and a mill, and reaches the sea
after ninety kilometres. In spring it carries ten times as much water as in late summer, and the
old bridge was built with five arches for that reason. Farmers along its banks grow apples, barley
and beans; the market is held on the first Saturday of every month.

def area(width, height):
    \"\"\"Return the area of a rectangle.\"\"\"
    return width * height
"""
MAX_TOKENS = 256
#: A variant's divergence from its source may be this share of a context-free model's.
MAX_KL_SHARE = 0.5
#: One token at more than this share of positions is a repeating output, where the source's most
#: frequent token has less than the second share.
MAX_REPEAT, NORMAL_REPEAT = 0.9, 0.5
#: First transformers whose `from_pretrained` takes `dtype` in place of `torch_dtype`.
DTYPE_ARGUMENT = (4, 56)

#: First transformers that reads `rope_parameters`.
ROPE_PARAMETERS = (5, 0)

#: Loads a checkpoint folder as a causal language model.
Loader = Callable[[Path], Any]
#: Turns text into token ids.
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class LogitsReport:
    """How a variant's next-token distributions compare with the source's.

    Attributes:
        tokens: Positions compared.
        mean_kl: Mean Kullback-Leibler divergence of the variant from the source, in nats.
        context_free_kl: The same for a model that ignores the context and always answers with
            the source's average distribution over these positions.
        top1_agreement: Share of positions with the same most likely token.
        source_distinct: Different most likely tokens of the source over all positions.
        variant_distinct: The same of the variant.
        source_repeat: Share of positions with the token that is most often the source's first
            choice.
        variant_repeat: The same of the variant.
        finite: Whether every logit of the variant is finite.
    """

    tokens: int
    mean_kl: float
    context_free_kl: float
    top1_agreement: float
    source_distinct: int
    variant_distinct: int
    source_repeat: float
    variant_repeat: float
    finite: bool

    def problem(self) -> str | None:
        """Return what is wrong with the variant, None if nothing is.

        The limit on the divergence is half that of a model that ignores its context: a variant
        beyond it has lost most of what the source knew. Losses of 4-bit weights are a twentieth of
        that model's divergence on Qwen2.5-0.5B, and a fifth on a model of 3 M parameters.
        """
        if not self.finite:
            return "its logits are not finite"
        if self.variant_distinct == 1 and self.source_distinct > 1:
            return f"it predicts one and the same token at all {self.tokens} positions"
        if self.variant_repeat > MAX_REPEAT and self.source_repeat < NORMAL_REPEAT:
            return (
                f"it predicts one and the same token at {100 * self.variant_repeat:.0f} % of"
                f" {self.tokens} positions; the source does so at"
                f" {100 * self.source_repeat:.0f} %"
            )
        if not self.mean_kl < MAX_KL_SHARE * self.context_free_kl:
            return (
                f"its predictions have little in common with the source's (mean KL"
                f" {self.mean_kl:.3g} nats; ignoring the context gives {self.context_free_kl:.3g})"
            )
        return None

    def summary(self) -> str:
        """Return the figures in one line."""
        return (
            f"loads; {self.tokens} next-token distributions are finite, with"
            f" {self.variant_distinct} different greedy tokens; against the source:"
            f" mean KL {self.mean_kl:.3g} nats"
            f" (a context-free guess: {self.context_free_kl:.3g}), top-1 agreement"
            f" {100 * self.top1_agreement:.1f} %"
        )


@dataclass(frozen=True)
class Reference:
    """The source's answer to `CHECK_TEXT`: token ids and logits of shape (tokens, vocabulary)."""

    ids: list[int]
    logits: Any


def source_reference(
    source: Path,
    *,
    device: str,
    trust_remote_code: bool,
    tokenize: Tokenize | None = None,
    load: Loader | None = None,
) -> Reference:
    """Compute what variants are compared with, before the work of making one begins.

    Args:
        source: Source checkpoint folder.
        device: "cpu" or "cuda".
        trust_remote_code: Whether the checkpoint's own Python code may run.
        tokenize: For a backend whose transformers cannot read the tokenizer, or that has it loaded
            already; by default transformers loads it.
        load: For a backend that has the model loaded already; by default transformers loads it.

    Raises:
        MeasurementError: The source itself is broken.
    """
    import torch
    from transformers import AutoTokenizer

    if tokenize is None:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        ids = tokenizer(CHECK_TEXT)["input_ids"]
    else:
        ids = tokenize(CHECK_TEXT)
    ids = ids[:MAX_TOKENS]
    logits = next_token_logits(source, ids, device, trust_remote_code, load)
    if not torch.isfinite(logits).all():
        raise MeasurementError(
            "the source checkpoint is broken: its logits are not finite",
            where=source,
            fix="download or copy the checkpoint again",
        )
    return Reference(ids, logits)


def check_saved(
    reference: Reference,
    saved: Path,
    *,
    device: str,
    trust_remote_code: bool,
    load: Loader | None = None,
) -> LogitsReport:
    """Load a saved variant and compare it with its source.

    Args:
        reference: What `source_reference` returned.
        saved: Folder of the variant.
        device: "cpu" or "cuda".
        trust_remote_code: Whether the checkpoint's own Python code may run.
        load: The backend's own loader, for a format its transformers cannot read; by default
            transformers loads it.

    Raises:
        MeasurementError: It does not load, or `LogitsReport.problem` finds something.
    """
    try:
        logits = next_token_logits(saved, reference.ids, device, trust_remote_code, load)
    except Exception as error:
        raise MeasurementError(
            f"the saved checkpoint does not load again: {type(error).__name__}: {error}",
            where=saved,
        ) from error
    report = compare_logits(reference.logits, logits)
    if problem := report.problem():
        raise MeasurementError(
            f"the variant is broken: {problem}",
            where=saved,
            detail=report.summary() if report.finite else None,
            fix="use more calibration samples, a larger dampening_frac or another method",
        )
    return report


def next_token_logits(
    path: Path, ids: list[int], device: str, trust_remote_code: bool, load: Loader | None = None
) -> Any:
    """Return float32 logits of shape (tokens, vocabulary) on the CPU."""
    import torch

    model = load(path) if load else _load(path, device, trust_remote_code)
    model.eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        logits = logits.float().cpu()
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return logits


def _load(path: Path, device: str, trust_remote_code: bool) -> Any:
    import transformers

    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    argument = "dtype" if version >= DTYPE_ARGUMENT else "torch_dtype"
    return transformers.AutoModelForCausalLM.from_pretrained(
        path,
        # "auto" spreads a model that is larger than one GPU.
        device_map="auto" if device == "cuda" else None,
        trust_remote_code=trust_remote_code,
        **{argument: "auto"},
        **old_rope_settings(path, version),
    )


def old_rope_settings(path: Path, version: tuple[int, ...]) -> dict[str, Any]:
    """Return the rotary settings of a config that older transformers would overlook.

    transformers 5 writes them as `rope_parameters`; before, they were `rope_theta` and
    `rope_scaling`, and a config without these is read with a theta of 10,000.
    """
    config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    found = config.get("rope_parameters")
    if version >= ROPE_PARAMETERS or not isinstance(found, dict):
        return {}
    settings: dict[str, Any] = {}
    if "rope_theta" not in config and "rope_theta" in found:
        settings["rope_theta"] = found["rope_theta"]
    if config.get("rope_scaling") is None and found.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {k: v for k, v in found.items() if k != "rope_theta"}
    return settings


def compare_logits(reference: Any, logits: Any) -> LogitsReport:
    """Compare two float tensors of logits, both of shape (tokens, vocabulary)."""
    import torch

    finite = bool(torch.isfinite(logits).all())
    p = torch.log_softmax(reference, dim=-1)
    q = torch.log_softmax(logits, dim=-1)
    average = torch.logsumexp(p, dim=0) - math.log(len(p))
    top_p, top_q = reference.argmax(dim=-1), logits.argmax(dim=-1)
    return LogitsReport(
        tokens=len(p),
        mean_kl=float((p.exp() * (p - q)).sum(dim=-1).mean()) if finite else math.nan,
        context_free_kl=float((p.exp() * (p - average)).sum(dim=-1).mean()),
        top1_agreement=float((top_p == top_q).double().mean()),
        source_distinct=len(top_p.unique()),
        variant_distinct=len(top_q.unique()),
        source_repeat=float((top_p == top_p.mode().values).double().mean()),
        variant_repeat=float((top_q == top_q.mode().values).double().mean()),
        finite=finite,
    )
