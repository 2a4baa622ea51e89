"""Tasks are checked before a server starts, and read from local data where there is any."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
from fakes.hub_copy import write_mmlu

from qkit.errors import HubUnreachableError, InputError
from qkit.evaluate import task_catalog, task_data
from qkit.evaluate.task_catalog import HubDataset, check_task, load_task, num_fewshot
from qkit.evaluate.tasks.mmlu_dev import OtherQuestions, parse, questions
from qkit.suites import AccuracySuite


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, with an empty cache, whatever the machine has."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    task_data._why_not_on_hub.cache_clear()


def check(task: str, data: Path | None = None) -> None:
    check_task(AccuracySuite(task=task), data=data)


class TestCheck:
    def test_the_offline_task_needs_nothing(self) -> None:
        check("mmlu_dev")

    def test_an_unknown_task_names_the_nearest(self) -> None:
        with pytest.raises(InputError) as caught:
            check("helaswag")
        assert "did you mean 'hellaswag'?" in str(caught.value)
        assert "mmlu_dev" in str(caught.value)

    @pytest.mark.parametrize("task", ["ai2_arc", "openllm"])
    def test_a_name_without_a_score_of_its_own_names_its_tasks(self, task: str) -> None:
        with pytest.raises(InputError) as caught:
            check(task)
        assert "no score of its own" in str(caught.value)
        assert "arc_challenge" in str(caught.value)

    @pytest.mark.parametrize(
        ("task", "dataset"),
        [
            ("mmlu", "cais/mmlu"),
            ("mmlu_anatomy", "cais/mmlu"),
            ("arc_challenge", "allenai/ai2_arc"),
            ("wikitext", "EleutherAI/wikitext_document_level"),
        ],
    )
    def test_missing_data_says_how_to_fetch_it(self, task: str, dataset: str) -> None:
        with pytest.raises(HubUnreachableError) as caught:
            check(task)
        message = str(caught.value)
        assert f"hf download --repo-type dataset {dataset} --local-dir DIR/{dataset}" in message
        assert "`--data DIR`" in message
        assert "HF_HUB_OFFLINE" in message
        assert "mmlu_dev" in message

    def test_missing_data_names_the_folder_that_lacks_it(self, tmp_path: Path) -> None:
        with pytest.raises(HubUnreachableError, match=f"it is not in {tmp_path}"):
            check("mmlu", tmp_path)

    def test_an_unreachable_hub_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
            with pytest.raises(HubUnreachableError, match=f"{endpoint} is not reachable"):
                check("mmlu_anatomy")

    def test_a_local_copy_is_enough(self, tmp_path: Path) -> None:
        check("mmlu_anatomy", write_mmlu(tmp_path, {"anatomy": 2}))

    def test_a_copy_without_a_subject_of_the_group_is_not(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot be read") as caught:
            check("mmlu", write_mmlu(tmp_path, {"anatomy": 2}))
        assert "configuration abstract_algebra" in str(caught.value)

    def test_a_cached_copy_is_enough(self, tmp_path: Path) -> None:
        folder = tmp_path / "cache" / "cais___mmlu" / "anatomy" / "0.0.0" / "abc"
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text("{}")
        check("mmlu_anatomy")
        with pytest.raises(HubUnreachableError, match="configuration astronomy"):
            check("mmlu_astronomy")

    def test_a_data_folder_that_does_not_exist_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="does not exist"):
            check("mmlu_dev", tmp_path / "absent")


class TestFewShot:
    def test_mmlu_has_five_by_convention(self) -> None:
        assert num_fewshot(AccuracySuite(task="mmlu")) == 5
        assert num_fewshot(AccuracySuite(task="mmlu", num_fewshot=0)) == 0

    def test_other_tasks_have_their_own(self) -> None:
        assert num_fewshot(AccuracySuite(task="mmlu_dev")) is None


class TestLoad:
    def test_local_data_is_read_from_its_folder(self, tmp_path: Path) -> None:
        data = write_mmlu(tmp_path, {"anatomy": 3})
        loaded = load_task(AccuracySuite(task="mmlu_anatomy"), data=data)
        task = loaded.leaves["mmlu_anatomy"]
        assert [doc["question"] for doc in task.test_docs()] == [
            f"Which test fact number {n} of anatomy is right?" for n in range(3)
        ]

    def test_a_copy_without_the_subject_is_an_error(self, tmp_path: Path) -> None:
        data = write_mmlu(tmp_path, {"anatomy": 3})
        with pytest.raises(InputError, match="'mmlu_astronomy' does not load") as caught:
            load_task(AccuracySuite(task="mmlu_astronomy"), data=data)
        assert "astronomy" in str(caught.value)

    def test_without_data_and_hub_the_data_set_is_named(self) -> None:
        with pytest.raises(HubUnreachableError, match="cais/mmlu"):
            load_task(AccuracySuite(task="mmlu_anatomy"), data=None)

    def test_all_subjects_of_mmlu_read_one_data_set(self) -> None:
        manager = task_catalog._manager_of("mmlu")
        found = task_catalog.hub_datasets(manager, "mmlu")
        assert len(found) == 57
        assert {dataset.path for dataset in found} == {"cais/mmlu"}
        assert HubDataset("cais/mmlu", "world_religions") in found


class TestMmluDev:
    def test_the_packages_questions_are_read_whole(self) -> None:
        found = questions()
        assert len(found) == 281
        subjects = Counter(question["subject"] for question in found)
        assert len(subjects) == 57
        assert set(subjects.values()) <= {3, 4, 5}
        for question in found:
            assert len(question["choices"]) == 4
            assert all(question["choices"])
            assert question["question"]
            assert not any("(A)" in text or "(D)" in text for text in question["choices"])

    def test_the_answers_are_those_of_the_solutions(self) -> None:
        answers = Counter(question["answer"] for question in questions())
        assert set(answers) == {0, 1, 2, 3}
        assert min(answers.values()) > 40

    def test_a_question_is_taken_apart(self) -> None:
        found = parse("s", "What?\n(A) a, b (B) c (d) (C) e\nf (D) g", "So. The answer is (B).")
        assert found is not None
        assert found["question"] == "What?"
        assert found["choices"] == ["a, b", "c (d)", "e\nf", "g"]
        assert found["answer"] == 1

    @pytest.mark.parametrize(
        ("question", "solution"),
        [
            ("What? (A) a (B) b (C) c (D) d (E) e", "The answer is (A)."),
            ("What? (A) a (B) b (C) c (D) d", "I do not know."),
            ("What?", "The answer is (A)."),
        ],
    )
    def test_what_is_not_a_four_option_question_is_left_out(
        self, question: str, solution: str
    ) -> None:
        assert parse("s", question, solution) is None

    def test_the_prompt_is_mmlus(self, tmp_path: Path) -> None:
        ours = load_task(AccuracySuite(task="mmlu_dev"), data=None).leaves["mmlu_dev"]
        data = write_mmlu(tmp_path, {"abstract_algebra": 1})
        theirs = load_task(AccuracySuite(task="mmlu_abstract_algebra"), data=data)
        mmlu = theirs.leaves["mmlu_abstract_algebra"]
        doc = next(iter(ours.test_docs()))
        assert ours.fewshot_context(doc, 0) == mmlu.fewshot_context(doc, 0)
        assert ours.fewshot_context(doc, 0).startswith(
            "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        )

    @pytest.mark.parametrize("shots", [1, 4, 5, 12])
    def test_a_question_is_never_among_its_own_examples(self, shots: int) -> None:
        pool = questions()
        sampler = OtherQuestions(pool)
        for doc in pool:
            examples = sampler.sample(shots, eval_doc=doc)
            texts = [example["question"] for example in examples]
            assert len(texts) == shots
            assert doc["question"] not in texts
            own = [example for example in examples if example["subject"] == doc["subject"]]
            available = [
                question
                for question in pool
                if question["subject"] == doc["subject"] and question["question"] != doc["question"]
            ]
            assert len(own) == min(shots, len(available))
            assert examples[-len(own) :] == own

    def test_more_examples_than_there_are_questions_are_refused(self) -> None:
        pool = questions()
        with pytest.raises(AssertionError, match="few-shot examples"):
            OtherQuestions(pool).sample(len(pool), eval_doc=pool[0])
