#!/usr/bin/env python3
"""Compare a run's fidelity figures, measured through vLLM, with a direct computation.

    .venv/bin/python scripts/check_fidelity.py artifacts/RUN

The same tokens go through transformers, baseline and variants loaded one after another on the CPU,
in the quantize environment (torch, transformers, compressed-tensors). Of its full distributions
both the exact divergence and the one from the likeliest tokens are computed. Figures have to agree:
perplexity within 0.5 %, top-1 agreement within 1 point, mean divergence within 15 % or within the
divergence of the two engines on the baseline itself, which is printed beside. Exits 1 otherwise.
Beside the perplexities' difference stands its 95 % interval over windows: where that is wider than
the limit, the run scored too few tokens to be judged by it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PERPLEXITY_PERCENT = 0.5
TOP1_POINTS = 1.0
KL_PERCENT = 15.0
BASELINE = "bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run's folder, measured with the fidelity suite")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    if find_spec("torch") is None:
        _in_quantize_environment()
    raise SystemExit(0 if check(arguments.run, arguments.dtype) else 1)


def _in_quantize_environment() -> None:
    """Start this script again where torch is."""
    from qkit.environments import python_of  # noqa: PLC0415

    python = str(python_of("quantize", "cpu"))
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    os.execve(python, [python, *sys.argv], variables)


@dataclass(frozen=True)
class Direct:
    """transformers' scores, and the exact divergence of each position from the baseline's."""

    scores: Any
    exact_kl: Any


def check(run: Path, dtype: str) -> bool:
    """Compute, print the table, and return whether all figures agree."""
    from qkit.evaluate.fidelity_scores import read_scores  # noqa: PLC0415

    names = sorted(path.parent.name for path in (run / "fidelity").glob("*/fidelity.npz"))
    names.sort(key=lambda name: name != BASELINE)
    if not names or names[0] != BASELINE:
        raise SystemExit(f"{run} has no fidelity measurement of {BASELINE}")
    served = {name: read_scores(run / "fidelity" / name / "fidelity.npz") for name in names}
    windows = _windows(run, served[BASELINE])
    logits: list[Any] = []
    direct = {}
    for name in names:
        print(f"computing {name} ...", file=sys.stderr, flush=True)
        direct[name] = _compute(_folder(run, name), windows, served[name], dtype, logits)
    return _report(served, direct)


def _folder(run: Path, name: str) -> Path:
    subject = json.loads((run / "variants" / name / "subject.json").read_text())
    return Path(subject["path"])


def _windows(run: Path, scores: Any) -> list[tuple[int, ...]]:
    """Cut the text again, and make sure that it is what was scored."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    from qkit.evaluate.fidelity_text import read_documents  # noqa: PLC0415
    from qkit.evaluate.fidelity_windows import make_windows  # noqa: PLC0415

    stored = json.loads((run / "measurements" / BASELINE / "fidelity.json").read_text())["fidelity"]
    documents = read_documents(None if stored["text"] == "qkit" else stored["text"])
    tokenizer = AutoTokenizer.from_pretrained(_folder(run, BASELINE))
    ids = [
        tokenizer(d.text, add_special_tokens=False, verbose=False)["input_ids"] for d in documents
    ]
    windows = make_windows(
        ids, window_tokens=stored["window_tokens"], tokens=stored["scored_tokens"]
    )
    if [t for w in windows for t in w.tokens[1:]] != scores.token.tolist():
        raise SystemExit("the text or its tokens are not those that were scored")
    return [window.tokens for window in windows]


def _compute(
    folder: Path, windows: list[tuple[int, ...]], like: Any, dtype: str, baseline: list[Any]
) -> Direct:
    """Score the windows; the first checkpoint's logits are kept in `baseline` for the others."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from qkit.evaluate.fidelity_scores import Scores  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    is_baseline, top = not baseline, like.top_ids.shape[1]
    own, top_ids, top_values, exact = [], [], [], []
    for index, tokens in enumerate(windows):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        q = torch.log_softmax(logits.float(), dim=-1)
        values, ids = torch.sort(q, dim=-1, descending=True, stable=True)
        own.append(q.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy())
        top_ids.append(ids[:, :top].to(torch.int32).numpy())
        top_values.append(values[:, :top].numpy())
        if is_baseline:
            baseline.append(logits.clone())
            continue
        p = torch.log_softmax(baseline[index].float(), dim=-1)
        exact.append((p.exp() * (p - q)).sum(dim=-1).numpy())
    del model
    gc.collect()
    scores = Scores(
        key="",
        document=like.document,
        window=like.window,
        token=like.token,
        logprob=np.concatenate(own),
        top_ids=np.concatenate(top_ids),
        top_logprobs=np.concatenate(top_values),
        generated=like.generated,
    )
    return Direct(scores, np.concatenate(exact) if exact else None)


def _change(mine: Any, direct: Any) -> str:
    """The 95 % interval, over windows, of the perplexities' difference in percent."""
    from qkit.evaluate.fidelity_bootstrap import Bootstrap  # noqa: PLC0415

    paired = direct.logprob.astype(np.float64) - mine.logprob
    bounds = Bootstrap(mine.window).mean(paired, np.expm1)
    if bounds.low is None or bounds.high is None:
        return "too few windows"
    return f"{100 * bounds.low:+.2f} to {100 * bounds.high:+.2f}"


def _report(served: dict[str, Any], direct: dict[str, Direct]) -> bool:
    from qkit.evaluate.fidelity_metrics import divergence, top1_agreement  # noqa: PLC0415

    base, base_direct = served[BASELINE], direct[BASELINE].scores
    engines = divergence(base_direct, base).lower.mean()
    agreement = 100 * top1_agreement(base_direct, base).mean()
    print(
        f"{len(base.token):,} tokens. {BASELINE} in vLLM against {BASELINE} in transformers: mean "
        f"KL {engines:.5f} nats, same top token {agreement:.2f} %"
    )
    print(
        f"{'':12} {'perplexity':^46} {'same top token, %':^21} {'mean KL, lower bound':^29}"
        f" {'mean KL':^19}"
    )
    print(
        f"{'':12} {'vLLM':>9} {'direct':>9} {'differ':>9} {'95 % interval':>16} {'vLLM':>6} "
        f"{'direct':>6} {'':>7} {'vLLM':>9} {'direct':>9} {'differ':>9} "
        f"{'estimate':>9} {'exact':>9}"
    )
    agrees = True
    for name, mine in served.items():
        other = direct[name]
        change = 100 * (mine.perplexity / other.scores.perplexity - 1)
        line = (
            f"{name:12} {mine.perplexity:9.4f} {other.scores.perplexity:9.4f} {change:+8.3f}% "
            f"{_change(mine, other.scores):>16}"
        )
        good = abs(change) <= PERPLEXITY_PERCENT
        if name != BASELINE:
            tops = [
                100 * top1_agreement(a, b).mean()
                for a, b in ((base, mine), (base_direct, other.scores))
            ]
            kl, kl_direct = divergence(base, mine), divergence(base_direct, other.scores)
            ours, theirs = kl.lower.mean(), kl_direct.lower.mean()
            differ = 100 * (ours / theirs - 1)
            line += (
                f" {tops[0]:6.2f} {tops[1]:6.2f} {tops[0] - tops[1]:+7.2f} {ours:9.5f} "
                f"{theirs:9.5f} {differ:+8.2f}% {kl.estimate.mean():9.5f} "
                f"{other.exact_kl.mean():9.5f}"
            )
            good &= abs(tops[0] - tops[1]) <= TOP1_POINTS
            good &= abs(differ) <= KL_PERCENT or abs(ours - theirs) <= engines
        agrees &= good
        print(line, "" if good else "  DIFFERS")
    return bool(agrees)


if __name__ == "__main__":
    main()
