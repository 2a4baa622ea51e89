"""The demo's checkpoint, questions and calibration set, as they ship."""

from __future__ import annotations

import json

import pytest
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from qkit.evaluate.task_catalog import load_task
from qkit.quantize.checkpoint import inspect_checkpoint
from qkit.recipe import RECIPES_DIR
from qkit.suites import AccuracySuite

DEMO = RECIPES_DIR / "demo"
MODEL = DEMO / "model"


def rows(name):
    return [json.loads(line) for line in (DEMO / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def test_the_checkpoint_is_a_small_qwen2_with_grouped_queries_and_tied_embeddings():
    checkpoint = inspect_checkpoint(MODEL)
    assert checkpoint.architecture == "Qwen2ForCausalLM"
    assert checkpoint.dtype == "BF16"
    assert checkpoint.tied
    assert 1 < checkpoint.num_kv_heads < checkpoint.num_heads
    assert checkpoint.hidden_size % 128 == 0
    assert checkpoint.intermediate_size % 128 == 0
    assert checkpoint.weight_bytes <= 8_000_000


@pytest.mark.parametrize("text", ["Hello, world!\n", "Ärger, 東京 and 🙂\t2 + 2 = 4", "  a   b"])
def test_the_tokenizer_keeps_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_is_chatml_with_a_default_system_prompt(tokenizer):
    turns = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_every_option_is_one_token_after_its_question(tokenizer):
    for row in rows("facts.jsonl"):
        context = f"Question: {row['question']}\nAnswer:"
        before = tokenizer(context)["input_ids"]
        for choice in row["choices"]:
            whole = tokenizer(f"{context} {choice}")["input_ids"]
            assert whole[:-1] == before


def test_the_questions_are_well_formed_and_balanced():
    questions = rows("facts.jsonl")
    assert len({row["question"] for row in questions}) == len(questions) >= 500
    for row in questions:
        assert len(set(row["choices"])) == 4
    positions = [row["answer"] for row in questions]
    assert {positions.count(i) for i in range(4)} == {len(questions) // 4}


def test_calibration_holds_no_question_of_the_evaluation():
    asked = {row["question"] for row in rows("facts.jsonl")}
    said = {message["content"] for row in rows("calibration.jsonl") for message in row["messages"]}
    assert len(rows("calibration.jsonl")) >= 256
    assert not asked & said


def test_the_task_loads_through_lm_eval():
    loaded = load_task(AccuracySuite(task="demo_facts"), data=None)
    (task,) = loaded.leaves.values() if isinstance(loaded.leaves, dict) else loaded.leaves
    documents = list(task.test_docs())
    assert len(documents) == len(rows("facts.jsonl"))
    assert task.doc_to_text(documents[0]) == f"Question: {documents[0]['question']}\nAnswer:"
    assert task.doc_to_choice(documents[0]) == documents[0]["choices"]
    assert isinstance(loaded.manager, TaskManager)
