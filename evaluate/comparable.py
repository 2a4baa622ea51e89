"""What makes two measurements comparable: the fields that must agree, and which of them do not.

Every function returns one short text per differing field, `FIELD VALUE vs VALUE (baseline)`, so
that a refused comparison can say why. Nothing is returned for fields that agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from qkit.measurements import (
    AccuracyResult,
    BenchResult,
    FidelityResult,
    Hardware,
    Measurement,
    ServerRecord,
)

#: Totals of the same machine differ by a few pages between kernels; other machines by far more.
MEMORY_TOLERANCE = 0.01
#: Characters of a hash that are shown.
HASH_SHOWN = 12

_VALUE_LIKE = re.compile(r"-?\d")


def differences(baseline: Measurement, variant: Measurement) -> tuple[str, ...]:
    """Return every field that forbids comparing two measurements of the same suite."""
    found = hardware_differences(baseline.hardware, variant.hardware)
    found += server_differences(baseline.server, variant.server)
    if baseline.bench and variant.bench:
        found += bench_differences(baseline.bench, variant.bench)
    if baseline.accuracy and variant.accuracy:
        found += accuracy_differences(baseline.accuracy, variant.accuracy)
    if baseline.fidelity and variant.fidelity:
        found += fidelity_differences(baseline.fidelity, variant.fidelity)
    return found


def hardware_differences(baseline: Hardware, variant: Hardware) -> tuple[str, ...]:
    """Compare two machines: accelerator, name, count, memory, processor and driver."""
    fields = ("accelerator", "name", "count", "cpu", "cpu_cores", "compute_capability", "driver")
    found = [
        _difference(f"hardware {field}", getattr(baseline, field), getattr(variant, field))
        for field in fields
    ]
    larger = max(baseline.memory_bytes, variant.memory_bytes)
    if abs(baseline.memory_bytes - variant.memory_bytes) > MEMORY_TOLERANCE * larger:
        found.append(
            _difference("hardware memory_bytes", baseline.memory_bytes, variant.memory_bytes)
        )
    return tuple(text for text in found if text)


def server_differences(baseline: ServerRecord, variant: ServerRecord) -> tuple[str, ...]:
    """Compare two servers: engine, version, served length, flags and environment.

    What follows from the weights themselves (kernels, weight memory, KV-cache tokens) may differ.
    """
    found = [
        _difference("server engine", baseline.engine, variant.engine),
        _difference("server version", baseline.version, variant.version),
        _difference("max_model_len", baseline.max_model_len, variant.max_model_len),
    ]
    before, after = Counter(flag_groups(baseline.flags)), Counter(flag_groups(variant.flags))
    only_before, only_after = before - after, after - before
    found.append(
        _difference(
            "server flags",
            " ".join(only_before.elements()) or None,
            " ".join(only_after.elements()) or None,
        )
    )
    found += _mapping_differences("environment", baseline.environment, variant.environment)
    return tuple(text for text in found if text)


def bench_differences(baseline: BenchResult, variant: BenchResult) -> tuple[str, ...]:
    """Compare two sweeps: prompts, lengths, stopping, endpoint and sampling."""
    found = [
        _hash_difference("prompt set", baseline.prompt_hash, variant.prompt_hash),
        _difference("workload", baseline.workload, variant.workload),
        _difference("input tokens", baseline.input_tokens, variant.input_tokens),
        _difference("output tokens", baseline.output_tokens, variant.output_tokens),
        _difference("ignore_eos", baseline.ignore_eos, variant.ignore_eos),
        _difference("endpoint", baseline.endpoint, variant.endpoint),
        _difference("arrivals", baseline.arrival, variant.arrival),
        *_mapping_differences("sampling", baseline.sampling, variant.sampling),
    ]
    return tuple(text for text in found if text)


def accuracy_differences(baseline: AccuracyResult, variant: AccuracyResult) -> tuple[str, ...]:
    """Compare how two scores were made: harness, tasks, few-shot, limit, template, tokenizer.

    What one of the two did not record is not compared; see `unknown_fields`.
    """
    before, after = baseline.headline, variant.headline
    found = [
        _difference("harness version", _version(baseline.harness), _version(variant.harness)),
        _difference("task", before.task, after.task),
        _difference("metric", before.metric, after.metric),
        _difference("filter", before.filter, after.filter),
        _difference("few-shot", baseline.num_fewshot, variant.num_fewshot),
        _difference("limit", baseline.limit, variant.limit),
        _difference("seed", baseline.seed, variant.seed),
        _difference("chat template", baseline.chat_template, variant.chat_template),
        _difference("system prompt", baseline.system_prompt, variant.system_prompt),
        _difference("truncation", baseline.truncate, variant.truncate),
        *_known_differences(
            _hash_difference, "tokenizer hash", baseline.tokenizer_hash, variant.tokenizer_hash
        ),
        *_known_differences(_difference, "BOS", baseline.add_bos_token, variant.add_bos_token),
        *_task_differences(baseline, variant),
    ]
    if baseline.chat_template and variant.chat_template:
        turns = "few-shot as turns", baseline.fewshot_as_multiturn, variant.fewshot_as_multiturn
        found.append(_difference(*turns))
        found += _known_differences(
            _hash_difference, "template hash", baseline.template_hash, variant.template_hash
        )
    return tuple(text for text in found if text)


def fidelity_differences(baseline: FidelityResult, variant: FidelityResult) -> tuple[str, ...]:
    """Compare what was scored: text, tokenizer, windows, tokens and generations."""
    found = [
        _hash_difference("text", baseline.text_hash, variant.text_hash),
        _hash_difference("tokenizer hash", baseline.tokenizer_hash, variant.tokenizer_hash),
        *(
            _difference(field.replace("_", " "), getattr(baseline, field), getattr(variant, field))
            for field in ("window_tokens", "scored_tokens", "top_logprobs", "greedy_tokens")
        ),
    ]
    if not any(found):  # whatever else may differ shows in what was sent
        found = [_hash_difference("tokens sent", baseline.tokens_hash, variant.tokens_hash)]
    return tuple(text for text in found if text)


def unknown_fields(baseline: AccuracyResult, variant: AccuracyResult) -> tuple[str, ...]:
    """Return the fields that ought to agree and that one of two results did not record."""
    checks = [
        ("tokenizer hash", baseline.tokenizer_hash, variant.tokenizer_hash),
        ("BOS", baseline.add_bos_token, variant.add_bos_token),
        ("task hash", _any_hash(baseline), _any_hash(variant)),
    ]
    if baseline.chat_template and variant.chat_template:
        checks.append(("template hash", baseline.template_hash, variant.template_hash))
    return tuple(name for name, before, after in checks if not _recorded(before, after))


def _any_hash(result: AccuracyResult) -> str | None:
    return next((score.config_hash for score in result.scores if score.config_hash), None)


def _task_differences(baseline: AccuracyResult, variant: AccuracyResult) -> list[str]:
    """Compare versions and configurations of the suite and of every task both have."""
    theirs = {score.task: score for score in (*baseline.scores, baseline.headline)}
    versions, hashes = [], []
    for score in {score.task: score for score in (*variant.scores, variant.headline)}.values():
        other = theirs.get(score.task)
        if other is None:
            continue
        versions += _known_differences(_difference, "version", other.version, score.version)
        hashes += _known_differences(
            _hash_difference, f"task hash of {score.task}", other.config_hash, score.config_hash
        )
    # Tasks of a group share their version; one text is enough.
    found = [f"task {text}" for text in dict.fromkeys(filter(None, versions))]
    return [*found, *[text for text in hashes if text][:1]]


def _known_differences(
    compare: Callable[[str, Any, Any], str], field: str, baseline: object, variant: object
) -> list[str]:
    return [compare(field, baseline, variant)] if _recorded(baseline, variant) else []


def _recorded(baseline: object, variant: object) -> bool:
    return all(value is not None and value != "" for value in (baseline, variant))


def _version(harness: str) -> str:
    """Return a harness's version: "lm-eval 0.4.13" and "0.4.13" are the same."""
    return harness.removeprefix("lm-eval ").removeprefix("lm_eval ")


def flag_groups(flags: tuple[str, ...]) -> list[str]:
    """Join each flag with its values: `("--a", "1", "--b=2")` is `["--a 1", "--b 2"]`."""
    groups: list[str] = []
    for word in flags:
        is_flag = word.startswith("-") and not _VALUE_LIKE.match(word)
        if is_flag or not groups:
            groups.append(word.replace("=", " ", 1) if is_flag else word)
        else:
            groups[-1] += f" {word}"
    return groups


def _mapping_differences(
    field: str, baseline: Mapping[str, object], variant: Mapping[str, object]
) -> list[str]:
    names = sorted(baseline.keys() | variant.keys())
    found = (_difference(f"{field} {n}", baseline.get(n), variant.get(n)) for n in names)
    return [text for text in found if text]


def _difference(field: str, baseline: object, variant: object) -> str:
    """Return the text of one differing field, or an empty one where the values agree."""
    if baseline == variant:
        return ""
    return f"{field} {_shown(variant)} vs {_shown(baseline)} (baseline)"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _hash_difference(field: str, baseline: str, variant: str) -> str:
    """Compare two hashes whole, but show only their beginnings."""
    if baseline == variant:
        return ""
    mine, base = (digest.removeprefix("sha256:")[:HASH_SHOWN] for digest in (variant, baseline))
    return f"{field} {mine} vs {base} (baseline)"
