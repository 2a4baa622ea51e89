"""Prompts of a sweep's cells: from a benchmark's workload to what every level sends.

They are a pure function of the suite (workload, seed, levels, counts), of the vocabulary and of
the served length, so two variants of one checkpoint get the same prompts. No prompt comes twice,
not in the warm-up and not at another level, unless repetition is the workload's point: otherwise a
prefix cache would answer part of the work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from qkit.evaluate.bench_requests import request_fields
from qkit.evaluate.workloads.drawing import Drawer
from qkit.evaluate.workloads.from_file import ChatFileSource, TraceSource, rows_of
from qkit.evaluate.workloads.short_chat import ShortChatSource
from qkit.evaluate.workloads.source import Part, Source
from qkit.evaluate.workloads.synthetic import MultiTurnSource, RandomSource, SharedPrefixSource
from qkit.evaluate.workloads.units import CellPrompts, Unit
from qkit.evaluate.workloads.vocabulary import Vocabulary
from qkit.suites import BenchSuite
from qkit.workloads import Fixed, FromFile, MultiTurn, RandomTokens, SharedPrefix, ShortChat

#: Tokens that a chat template puts around a prompt, at most; it begins every prompt alike.
TEMPLATE_TOKENS = 64
#: Stands for a served length that is not known.
_UNBOUNDED = 2**31


def requests_at(suite: BenchSuite, concurrency: int) -> int:
    """Return how many requests are measured at a level."""
    return max(suite.min_requests, suite.requests_per_slot * concurrency)


def draw_cell(
    source: Source, name: str, warmups: int, fewest_units: int, fewest_requests: int
) -> CellPrompts:
    """Draw one cell's units.

    The warm-up has one unit a slot, or as many as the workload needs. The measured part has as
    many units as make up the level's requests, and at least one a slot.

    Args:
        source: The workload.
        name: The cell's, different for each one of a sweep.
        warmups: Units of the warm-up, more where the workload needs them.
        fewest_units: Units measured at least.
        fewest_requests: Requests they make up at least.

    Raises:
        InputError: The workload does not give that many different prompts.
    """
    return CellPrompts(
        warmup=_units(source, name, "warmup", max(warmups, source.fewest_warmups), 0),
        measured=_units(source, name, "measured", fewest_units, fewest_requests),
    )


def _units(
    source: Source, cell: str, part: Part, fewest_units: int, fewest_requests: int
) -> tuple[Unit, ...]:
    units: list[Unit] = []
    requests = 0
    while len(units) < fewest_units or requests < fewest_requests:
        units.append(source.unit(cell, part, len(units)))
        requests += len(units[-1].turns)
    return tuple(units)


def source_of(suite: BenchSuite, vocabulary: Vocabulary, max_model_len: int | None) -> Source:
    """Return where a suite's units come from.

    Raises:
        InputError: The workload's file cannot be used.
    """
    drawer = Drawer(vocabulary, suite.seed, as_text=suite.endpoint == "chat")
    ending = "exactly" if suite.ignore_eos else "at most"
    template = TEMPLATE_TOKENS if suite.endpoint == "chat" else 0
    room = (max_model_len or _UNBOUNDED) - template
    match suite.workload:
        case RandomTokens(input=given_in, output=given_out):
            return RandomSource(
                drawer,
                given_in or Fixed(tokens=suite.input_tokens),
                given_out or Fixed(tokens=suite.output_tokens),
                ending,
                room,
            )
        case ShortChat():
            return ShortChatSource(suite.output_tokens, ending)
        case SharedPrefix() as workload:
            return SharedPrefixSource(drawer, workload, suite.output_tokens, ending, room)
        case MultiTurn() as workload:
            return MultiTurnSource(drawer, workload, suite.output_tokens, ending, room)
        case FromFile() as workload:
            return _file_source(suite, workload, vocabulary, drawer, room)


def _file_source(
    suite: BenchSuite, workload: FromFile, vocabulary: Vocabulary, drawer: Drawer, room: int
) -> Source:
    rows = rows_of(workload)
    if rows.trace:
        return TraceSource(rows.trace, suite, workload, drawer, room)
    turns = workload.turns or ("last" if rows.format == "openai" else "first")
    return ChatFileSource(rows.chats, suite, workload, vocabulary, drawer, room, turns=turns)


def prompts_hash(suite: BenchSuite, cells: Sequence[CellPrompts]) -> str:
    """Return the SHA-256 over all that a sweep sends, in sending order, but the model's name.

    That is every prompt, warm-up included, its length, the sampling, and the arrival times of a
    schedule.
    """
    digest = hashlib.sha256()
    for cell in cells:
        for unit in (*cell.warmup, *cell.measured):
            sent = [request_fields(suite, turn) for turn in unit.turns]
            line = json.dumps([unit.at_s, sent], ensure_ascii=False, sort_keys=True)
            digest.update(line.encode("utf-8") + b"\n")
    return digest.hexdigest()
