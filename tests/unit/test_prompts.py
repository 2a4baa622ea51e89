from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.tokenizers_for_tests import WORDS, write_byte_tokenizer

from qkit.errors import InputError
from qkit.evaluate.cell_plan import CellPlanner
from qkit.evaluate.prompts import prompts_hash, requests_at
from qkit.evaluate.workloads.units import CellPrompts, turns_of
from qkit.evaluate.workloads.vocabulary import Vocabulary, load_vocabulary
from qkit.suites import BenchSuite, Sampling

SUITE = BenchSuite(concurrency=(1, 4), min_requests=6, requests_per_slot=2, input_tokens=24)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    return load_vocabulary(write_byte_tokenizer(tmp_path, words=True))


def cells_of(suite: BenchSuite, vocabulary: Vocabulary) -> tuple[CellPrompts, ...]:
    return CellPlanner(suite, vocabulary).named


def prompts_of(cell: CellPrompts) -> list[object]:
    return [turn.prompt for turn in turns_of((*cell.warmup, *cell.measured))]


def hash_of(suite: BenchSuite, vocabulary: Vocabulary) -> str:
    return prompts_hash(suite, cells_of(suite, vocabulary))


def test_counts_per_level(vocabulary: Vocabulary) -> None:
    cells = cells_of(SUITE, vocabulary)
    shape = [(len(cell.warmup), len(cell.measured)) for cell in cells]
    assert (SUITE.concurrency, shape) == ((1, 4), [(1, 6), (4, 8)])
    assert requests_at(BenchSuite(), 16) == 64


def test_completion_prompts_have_exactly_the_asked_length_and_no_special_token(
    vocabulary: Vocabulary,
) -> None:
    special = set(vocabulary.tokenizer.get_added_tokens_decoder())
    assert len(special) == 2
    for cell in cells_of(SUITE, vocabulary):
        for prompt in prompts_of(cell):
            assert isinstance(prompt, tuple)
            assert len(prompt) == 24
            assert not special & set(prompt)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_no_prompt_comes_twice_in_a_sweep(vocabulary: Vocabulary, endpoint: str) -> None:
    suite = SUITE.model_copy(update={"endpoint": endpoint, "input_tokens": 2})
    prompts = [p for cell in cells_of(suite, vocabulary) for p in prompts_of(cell)]
    assert len(prompts) == len(set(prompts)) == 19


def test_same_suite_same_prompts_other_seed_other_prompts(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    again = load_vocabulary(write_byte_tokenizer(tmp_path / "copy", words=True))
    first = cells_of(SUITE, vocabulary)
    assert cells_of(SUITE, again) == first
    other = SUITE.model_copy(update={"seed": 1})
    assert not set(prompts_of(first[0])) & set(prompts_of(cells_of(other, vocabulary)[0]))
    assert hash_of(SUITE, vocabulary) == hash_of(SUITE, again)
    assert hash_of(SUITE, vocabulary) != hash_of(other, vocabulary)


@pytest.mark.parametrize(
    "change",
    [
        {"output_tokens": 9},
        {"ignore_eos": False},
        {"endpoint": "chat"},
        {"sampling": Sampling(temperature=0.3)},
        {"sampling": Sampling(top_p=0.9)},
    ],
)
def test_the_hash_covers_all_that_is_sent(vocabulary: Vocabulary, change: dict[str, Any]) -> None:
    changed = SUITE.model_copy(update=change)
    assert hash_of(changed, vocabulary) != hash_of(SUITE, vocabulary)
    assert hash_of(SUITE.model_copy(update={"timeout_s": 9}), vocabulary) == hash_of(
        SUITE, vocabulary
    )


def test_a_level_has_the_same_prompts_whatever_the_others_are(vocabulary: Vocabulary) -> None:
    alone = cells_of(SUITE.model_copy(update={"concurrency": (4,)}), vocabulary)
    assert alone[0] == cells_of(SUITE, vocabulary)[1]


def test_the_hash_is_pinned(vocabulary: Vocabulary) -> None:
    # Changes only if prompts do, and then stored results are no longer comparable with new ones.
    assert hash_of(SUITE, vocabulary) == (
        "a2c31a5ef0aef0c5369784e01fa648ff39be5095a4821990c610d715de8f1f11"
    )


def test_chat_prompts_are_words_that_keep_their_length(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.words) == len(WORDS)
    suite = SUITE.model_copy(update={"endpoint": "chat"})
    for cell in cells_of(suite, vocabulary):
        for prompt in prompts_of(cell):
            assert isinstance(prompt, str)
            # The first word has lost its leading space and with it its own token.
            assert vocabulary.count(" " + prompt) == 24


def test_a_vocabulary_without_words_uses_whole_characters(tmp_path: Path) -> None:
    plain = load_vocabulary(write_byte_tokenizer(tmp_path))
    shown = [plain.tokenizer.decode([i]) for i in plain.words]
    assert 64 < len(shown) < 128
    assert all(text.strip() and "\ufffd" not in text for text in shown)


def test_too_short_for_different_prompts(vocabulary: Vocabulary) -> None:
    suite = BenchSuite(concurrency=(200,), input_tokens=1)
    with pytest.raises(InputError, match="does not give enough different prompts"):
        CellPlanner(suite, vocabulary)


def test_missing_broken_and_empty_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not there"):
        load_vocabulary(tmp_path)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_vocabulary(broken)
