"""Whole suites through lm-eval on a fake server: scores, groups, samples, and what is printed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import lm_eval
import pytest
from fakes.hub_copy import write_mmlu
from fakes.question_model import write_question_model
from fakes.scoring_server import MODEL, ScoringServer
from lm_eval.models.openai_completions import LocalCompletionsAPI

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.accuracy import run_accuracy
from qkit.evaluate.drawing import draw_documents
from qkit.evaluate.harness_results import headline_metric, samples_of, task_scores
from qkit.evaluate.quiet import quiet_lm_eval
from qkit.evaluate.statistics import compare_samples, mean_stderr
from qkit.evaluate.task_catalog import load_task
from qkit.measurements import AccuracyResult
from qkit.suites import AccuracySuite

#: Subjects of the group mmlu_other, of different sizes.
SUBJECTS = {
    "business_ethics": 3,
    "clinical_knowledge": 11,
    "college_medicine": 2,
    "global_facts": 7,
    "human_aging": 4,
    "management": 5,
    "marketing": 2,
    "medical_genetics": 3,
    "miscellaneous": 9,
    "nutrition": 2,
    "professional_accounting": 4,
    "professional_medicine": 2,
    "virology": 6,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    return write_question_model(folder, ["The following are multiple choice questions"] * 50)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mmlu(tmp_path_factory.mktemp("data"), SUBJECTS)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def server() -> Iterator[ScoringServer]:
    with ScoringServer(max_model_len=8192) as server:
        yield server


def run(
    server: ScoringServer, checkpoint: Path, suite: AccuracySuite, data: Path | None = None
) -> AccuracyResult:
    return run_accuracy(
        suite,
        base_url=server.url,
        model=MODEL,
        tokenizer_path=checkpoint,
        max_model_len=None,
        data=data,
    )


class TestOneTask:
    def test_score_and_samples_belong_together(
        self, server: ScoringServer, checkpoint: Path
    ) -> None:
        result = run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=30))
        values = [sample.value for sample in result.samples]
        assert result.headline.n == len(values) == 30
        assert result.headline.value == pytest.approx(sum(values) / 30)
        assert result.headline.stderr == pytest.approx(mean_stderr(values))
        for sample in result.samples:
            best = max(range(4), key=lambda option: sample.loglikelihoods[option])
            assert sample.value == float(str(best) == sample.target)

    def test_what_is_needed_to_compare_is_kept(
        self, server: ScoringServer, checkpoint: Path
    ) -> None:
        result = run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=12, num_fewshot=2))
        assert result.harness == "lm-eval 0.4.13"
        assert result.headline.version == "1.0"
        assert (result.num_fewshot, result.limit) == (2, 12)
        assert result.requests == len(server.bodies) == 12
        assert result.prompt_tokens == sum(len(body["prompt"]) for body in server.bodies)
        assert result.cached_tokens == result.prompt_tokens - server.prefilled
        assert any("12" in mark for mark in result.marks)
        assert AccuracyResult.model_validate_json(result.model_dump_json()) == result

    def test_the_same_run_twice_has_no_difference(
        self, server: ScoringServer, checkpoint: Path
    ) -> None:
        suite = AccuracySuite(task="mmlu_dev", limit=20, num_fewshot=3)
        one, other = (run(server, checkpoint, suite) for _ in range(2))
        comparison = compare_samples(one.samples, other.samples)
        assert comparison.n == 20
        assert (comparison.flips_to_wrong, comparison.flips_to_right) == (0, 0)

    def test_lm_evals_own_client_gives_the_same_score(
        self, server: ScoringServer, checkpoint: Path
    ) -> None:
        ours = run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=25))
        loaded = load_task(AccuracySuite(task="mmlu_dev"), data=None)
        drawn = draw_documents(loaded.leaves, 25, 0)
        with quiet_lm_eval():
            theirs = lm_eval.simple_evaluate(
                model=LocalCompletionsAPI(
                    base_url=f"{server.url}/v1/completions",
                    model=MODEL,
                    tokenizer=str(checkpoint),
                    tokenizer_backend="huggingface",
                    num_concurrent=8,
                    max_length=8192,
                ),
                tasks=loaded.roots,
                task_manager=loaded.manager,
                samples=drawn,
            )
        assert theirs is not None
        metric = headline_metric(theirs, "mmlu_dev")
        assert task_scores(theirs, metric, "mmlu_dev")[0] == ours.headline
        assert tuple(samples_of(theirs, metric, loaded.leaves)) == ours.samples

    def test_nothing_is_printed(
        self, server: ScoringServer, checkpoint: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=5, chat_template=True))
        captured = capfd.readouterr()
        assert captured.out == captured.err == ""

    def test_the_chat_template_reaches_the_prompt(
        self, server: ScoringServer, checkpoint: Path
    ) -> None:
        plain = run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=2))
        plain_prompts = [body["prompt"] for body in server.bodies]
        chat = run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=2, chat_template=True))
        chat_prompts = [body["prompt"] for body in server.bodies[len(plain_prompts) :]]
        assert (plain.chat_template, chat.chat_template) == (False, True)
        assert all(len(chat) > len(p) for chat, p in zip(chat_prompts, plain_prompts, strict=False))


class TestGroup:
    @pytest.fixture(scope="class")
    @classmethod
    def result(
        cls, checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> AccuracyResult:
        with pytest.MonkeyPatch.context() as patch, ScoringServer(max_model_len=8192) as server:
            patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
            return run(server, checkpoint, AccuracySuite(task="mmlu_other"), data)

    def test_questions_weigh_the_same_whatever_their_subject(self, result: AccuracyResult) -> None:
        values = [sample.value for sample in result.samples]
        assert result.headline.task == "mmlu_other"
        assert result.headline.is_group
        assert result.headline.n == len(values) == sum(SUBJECTS.values())
        assert result.headline.value == pytest.approx(sum(values) / len(values))
        subjects = [score.value for score in result.scores if not score.is_group]
        assert len(subjects) == len(SUBJECTS)
        assert result.headline.value != pytest.approx(sum(subjects) / len(subjects))

    def test_the_standard_error_is_pooled_over_subjects(self, result: AccuracyResult) -> None:
        subjects = [score for score in result.scores if not score.is_group]
        # lm-eval's pooled_sample_stderr: within-subject variances, weighted by size.
        pooled = sum((s.n - 1) * (s.stderr or 0) ** 2 * s.n for s in subjects)
        total = sum(s.n for s in subjects)
        expected = math.sqrt(pooled / (total - len(subjects)) / total)
        assert result.headline.stderr == pytest.approx(expected)

    def test_mmlu_is_five_shot_by_convention(self, result: AccuracyResult) -> None:
        assert result.num_fewshot == 5
        assert {score.num_fewshot for score in result.scores} == {5}

    def test_subjects_share_their_examples_in_the_cache(self, result: AccuracyResult) -> None:
        assert result.cached_tokens is not None
        assert result.cached_tokens > 0.5 * result.prompt_tokens


def test_a_group_of_groups_has_its_tasks_few_shot_count() -> None:
    # As lm-eval leaves it: the top group is missing in "n-shot".
    row = {"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 8}
    results = {
        "results": {"mmlu": row, "mmlu_stem": row, "mmlu_anatomy": row},
        "groups": {"mmlu": row, "mmlu_stem": row},
        "versions": {"mmlu": "2"},
        "n-shot": {"mmlu_stem": 5, "mmlu_anatomy": 5},
    }
    scores = task_scores(results, ("acc", "none"), "mmlu")
    assert [(s.task, s.num_fewshot) for s in scores] == [
        ("mmlu", 5),
        ("mmlu_stem", 5),
        ("mmlu_anatomy", 5),
    ]


class TestFaults:
    def test_a_server_without_log_probabilities_gives_no_score(self, checkpoint: Path) -> None:
        with (
            ScoringServer(fault="no_logprobs", fault_after=3, max_model_len=8192) as server,
            pytest.raises(MeasurementError, match="no log-probabilities"),
        ):
            run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=8))

    def test_too_many_examples_are_the_persons_mistake(
        self, server: ScoringServer, checkpoint: Path, data: Path
    ) -> None:
        suite = AccuracySuite(task="mmlu_virology", num_fewshot=6)
        with pytest.raises(InputError, match="fewer few-shot examples") as caught:
            run(server, checkpoint, suite, data)
        assert "exceeds the 5 that are available" in str(caught.value)

    def test_a_prompt_over_the_served_length_is_an_error(self, checkpoint: Path) -> None:
        with (
            ScoringServer(max_model_len=64) as server,
            pytest.raises(InputError, match="do not fit the served length of 64"),
        ):
            run(server, checkpoint, AccuracySuite(task="mmlu_dev", limit=8))

    def test_a_tokenizer_without_chat_template_is_an_error(
        self, server: ScoringServer, checkpoint: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (copy / name).write_bytes((checkpoint / name).read_bytes())
        with pytest.raises(InputError, match="no chat template"):
            run(server, copy, AccuracySuite(task="mmlu_dev", chat_template=True))
