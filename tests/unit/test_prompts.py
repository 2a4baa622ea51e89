from __future__ import annotations

from pathlib import Path

import pytest
from fakes.tokenizers_for_tests import WORDS, write_byte_tokenizer

from qkit.errors import InputError
from qkit.evaluate.prompts import (
    Vocabulary,
    load_vocabulary,
    plan_prompts,
    prompts_hash,
    requests_at,
)
from qkit.suites import BenchSuite

SUITE = BenchSuite(concurrency=(1, 4), min_requests=6, requests_per_slot=2, input_tokens=24)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    return load_vocabulary(write_byte_tokenizer(tmp_path, words=True))


def test_counts_per_level(vocabulary: Vocabulary) -> None:
    cells = plan_prompts(SUITE, vocabulary)
    shape = [(cell.concurrency, len(cell.warmup), len(cell.measured)) for cell in cells]
    assert shape == [(1, 1, 6), (4, 4, 8)]
    assert requests_at(BenchSuite(), 16) == 64


def test_completion_prompts_have_exactly_the_asked_length_and_no_special_token(
    vocabulary: Vocabulary,
) -> None:
    special = set(vocabulary.tokenizer.get_added_tokens_decoder())
    assert len(special) == 2
    for cell in plan_prompts(SUITE, vocabulary):
        for prompt in (*cell.warmup, *cell.measured):
            assert not isinstance(prompt, str)
            assert len(prompt) == 24
            assert not special & set(prompt)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_no_prompt_comes_twice_in_a_sweep(vocabulary: Vocabulary, endpoint: str) -> None:
    suite = SUITE.model_copy(update={"endpoint": endpoint, "input_tokens": 2})
    prompts = [p for c in plan_prompts(suite, vocabulary) for p in (*c.warmup, *c.measured)]
    assert len(prompts) == len(set(prompts)) == 19


def test_same_suite_same_prompts_other_seed_other_prompts(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    again = load_vocabulary(write_byte_tokenizer(tmp_path / "copy", words=True))
    first = plan_prompts(SUITE, vocabulary)
    assert plan_prompts(SUITE, again) == first
    other = plan_prompts(SUITE.model_copy(update={"seed": 1}), vocabulary)
    assert not set(first[0].measured) & set(other[0].measured)
    assert prompts_hash(first) == prompts_hash(plan_prompts(SUITE, again))
    assert prompts_hash(first) != prompts_hash(other)


def test_a_level_has_the_same_prompts_whatever_the_others_are(vocabulary: Vocabulary) -> None:
    alone = plan_prompts(SUITE.model_copy(update={"concurrency": (4,)}), vocabulary)
    assert alone[0] == plan_prompts(SUITE, vocabulary)[1]


def test_the_hash_is_pinned(vocabulary: Vocabulary) -> None:
    # Changes only if prompts do, and then stored results are no longer comparable with new ones.
    assert prompts_hash(plan_prompts(SUITE, vocabulary)) == (
        "28d5de74f66329acceeaf07898d25f28db79a3cf98683d61f18362af6922bfd8"
    )


def test_chat_prompts_are_words_that_keep_their_length(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.words()) == len(WORDS)
    suite = SUITE.model_copy(update={"endpoint": "chat"})
    for cell in plan_prompts(suite, vocabulary):
        for prompt in cell.measured:
            assert isinstance(prompt, str)
            # The first word has lost its leading space and with it its own token.
            assert vocabulary.count(" " + prompt) == 24


def test_a_vocabulary_without_words_uses_whole_characters(tmp_path: Path) -> None:
    plain = load_vocabulary(write_byte_tokenizer(tmp_path))
    shown = [plain.tokenizer.decode([i]) for i in plain.words()]
    assert 64 < len(shown) < 128
    assert all(text.strip() and "\ufffd" not in text for text in shown)


def test_too_short_for_different_prompts(vocabulary: Vocabulary) -> None:
    suite = BenchSuite(concurrency=(200,), input_tokens=1)
    with pytest.raises(InputError, match="does not give enough different prompts"):
        plan_prompts(suite, vocabulary)


def test_missing_broken_and_empty_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not there"):
        load_vocabulary(tmp_path)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_vocabulary(broken)
