"""Every task qkit knows by name runs on data in its own layout, and says what it lacks."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import datasets
import huggingface_hub.constants
import nltk
import pytest
from fakes.known_tasks import KNOWN, TEST, write_known
from fakes.question_model import write_question_model
from fakes.scoring_server import MODEL, ScoringServer

from qkit.errors import HubUnreachableError, InputError
from qkit.evaluate import task_data
from qkit.evaluate.accuracy import run_accuracy
from qkit.evaluate.conventions import FEWSHOT
from qkit.evaluate.task_catalog import check_task, load_task
from qkit.measurements import AccuracyResult
from qkit.suites import AccuracySuite

#: Few-shot counts people compare with: Open LLM Leaderboard v1, and ifeval's and wikitext's own.
SHOTS = {
    "arc_challenge": 25, "hellaswag": 10, "winogrande": 5, "truthfulqa_mc2": 0, "gsm8k": 5,
    "ifeval": 0, "wikitext": 0,
}  # fmt: skip
METRICS = {
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "truthfulqa_mc2": "acc",
    "gsm8k": "exact_match",
    "ifeval": "prompt_level_strict_acc",
    "wikitext": "word_perplexity",
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, with an empty cache, and an NLTK resource that is there but empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "nltk" / "tokenizers" / "punkt_tab").mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    task_data._why_not_on_hub.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    return write_question_model(folder, ["The cup of the shop is number one of the things"] * 50)


def run(task: str, checkpoint: Path, data: Path, **settings: object) -> AccuracyResult:
    suite = AccuracySuite.model_validate({"task": task, **settings})
    check_task(suite, data=data)
    with ScoringServer(max_model_len=8192) as server:
        return run_accuracy(
            suite,
            base_url=server.url,
            model=MODEL,
            tokenizer_path=checkpoint,
            max_model_len=None,
            data=data,
        )


class TestRun:
    @pytest.mark.parametrize("task", KNOWN)
    def test_a_task_runs_with_its_conventional_examples(
        self, task: str, checkpoint: Path, tmp_path: Path
    ) -> None:
        result = run(task, checkpoint, write_known(tmp_path / "data", task))
        assert result.headline.n == len(result.samples) == TEST
        assert (result.headline.task, result.headline.metric) == (task, METRICS[task])
        assert result.num_fewshot == SHOTS[task] == FEWSHOT[task].count
        assert math.isfinite(result.headline.value)
        assert result.headline.stderr is not None
        assert result.headline.config_hash
        assert not result.marks
        assert AccuracyResult.model_validate_json(result.model_dump_json()) == result

    def test_the_persons_count_wins(self, checkpoint: Path, tmp_path: Path) -> None:
        data = write_known(tmp_path / "data", "winogrande")
        assert run("winogrande", checkpoint, data, num_fewshot=2).num_fewshot == 2
        assert run("winogrande", checkpoint, data, num_fewshot=0).num_fewshot == 0

    def test_a_generation_task_keeps_its_texts(self, checkpoint: Path, tmp_path: Path) -> None:
        result = run("gsm8k", checkpoint, write_known(tmp_path / "data", "gsm8k"))
        for sample in result.samples:
            assert sample.filter == result.headline.filter == "strict-match"
            assert sample.generated
            assert sample.filtered == "[invalid]"  # the fake's letters hold no "#### 7"
            assert sample.loglikelihoods == ()

    def test_options_keep_log_likelihoods_and_no_text(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        result = run("truthfulqa_mc2", checkpoint, write_known(tmp_path / "data", "truthfulqa_mc2"))
        assert [len(sample.loglikelihoods) for sample in result.samples] == [3, 4] * 3
        assert {(s.filter, s.generated, s.filtered) for s in result.samples} == {(None,) * 3}
        # The score is the true options' share of the probability.
        for sample in result.samples:
            shares = [math.exp(value) for value in sample.loglikelihoods]
            assert sample.value == pytest.approx(sum(shares[:2]) / sum(shares))

    def test_the_bootstrap_of_a_perplexity_is_seeded(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        data = write_known(tmp_path / "data", "wikitext")
        first, second = (run("wikitext", checkpoint, data).headline for _ in range(2))
        assert first.stderr
        assert first.stderr == second.stderr

    def test_the_hubs_own_parquet_copy_is_read(self, checkpoint: Path, tmp_path: Path) -> None:
        folder = write_known(tmp_path / "data", "gsm8k") / "openai" / "gsm8k"
        (folder / "README.md").unlink()
        for split in ("train", "test"):
            (folder / "main" / split).mkdir()
            file = folder / "main" / f"{split}-00000-of-00001.parquet"
            file.rename(folder / "main" / split / "0000.parquet")
        assert run("gsm8k", checkpoint, tmp_path / "data").headline.n == TEST

    def test_mmlu_has_categories_and_an_overall_score_weighed_by_questions(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        result = run("mmlu", checkpoint, write_known(tmp_path / "data", "mmlu"))
        groups = {score.task: score for score in result.scores if score.is_group}
        assert next(iter(groups)) == "mmlu"
        categories = [score for name, score in groups.items() if name != "mmlu"]
        assert {s.task for s in categories} >= {
            "mmlu_stem", "mmlu_humanities", "mmlu_social_sciences", "mmlu_other",
        }  # fmt: skip
        four = [s for s in categories if s.task.count("_") < 3 and not s.task.endswith("_tasks")]
        assert sum(s.n for s in four) == groups["mmlu"].n == 114
        weighed = sum(s.value * s.n for s in four) / 114
        assert result.headline.value == pytest.approx(weighed)
        assert result.num_fewshot == 5


class TestMissing:
    @pytest.mark.parametrize("task", [*KNOWN, "mmlu"])
    def test_missing_data_is_named_with_how_to_fetch_it(self, task: str, tmp_path: Path) -> None:
        path = "cais/mmlu" if task == "mmlu" else KNOWN[task][0]
        with pytest.raises(HubUnreachableError) as caught:
            check_task(AccuracySuite(task=task), data=tmp_path)
        message = str(caught.value)
        command = f"hf download --repo-type dataset {path} --local-dir {tmp_path}/{path}"
        assert command in message
        assert "HF_HUB_OFFLINE" in message

    @pytest.mark.parametrize("task", ["arc_challenge", "gsm8k", "winogrande"])
    def test_a_copy_without_the_configuration_is_refused(self, task: str, tmp_path: Path) -> None:
        data = write_known(tmp_path, task)
        readme = data / KNOWN[task][0] / "README.md"
        readme.write_text(
            readme.read_text().replace(f"config_name: {KNOWN[task][1]}", "config_name: x")
        )
        with pytest.raises(InputError, match=f"configuration {KNOWN[task][1]}"):
            check_task(AccuracySuite(task=task), data=data)

    def test_a_copy_without_the_split_is_refused(self, tmp_path: Path) -> None:
        readme = write_known(tmp_path, "gsm8k") / "openai" / "gsm8k" / "README.md"
        readme.write_text(readme.read_text().replace("split: test", "split: other"))
        with pytest.raises(InputError, match="lacks the split 'test'") as caught:
            check_task(AccuracySuite(task="gsm8k"), data=tmp_path)
        assert "it has: train, other" in str(caught.value)

    def test_a_loading_script_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "Rowan" / "hellaswag"
        folder.mkdir(parents=True)
        (folder / "hellaswag.py").write_text("import datasets\n")
        for check in (check_task, load_task):
            with pytest.raises(InputError) as caught:
                check(AccuracySuite(task="hellaswag"), data=tmp_path)
            assert "loading script" in str(caught.value)
            assert "--revision refs/convert/parquet" in str(caught.value)

    def test_a_task_without_questions_is_refused(self, tmp_path: Path) -> None:
        data = write_known(tmp_path, "gsm8k")
        file = data / "openai" / "gsm8k" / "main" / "test-00000-of-00001.parquet"
        rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "c"))
        rows.select([]).to_parquet(file)
        with pytest.raises(InputError, match="no questions"):
            load_task(AccuracySuite(task="gsm8k"), data=data)

    def test_packages_a_task_needs_are_named_with_how_to_install_them(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *a: None if n == "langdetect" else found(n, *a)
        )
        with pytest.raises(InputError) as caught:
            check_task(AccuracySuite(task="ifeval"), data=write_known(tmp_path, "ifeval"))
        assert "not installed: langdetect" in str(caught.value)
        assert f"uv pip install --python {sys.executable} 'lm_eval[ifeval]==" in str(caught.value)

    def test_data_that_a_task_would_fetch_while_it_is_imported_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(nltk.data, "path", [])
        with pytest.raises(InputError, match=r"nltk\.downloader punkt_tab"):
            check_task(AccuracySuite(task="ifeval"), data=write_known(tmp_path, "ifeval"))

    @pytest.mark.parametrize("task", ["ifeval", "truthfulqa_mc2"])
    def test_examples_lm_eval_would_leave_out_are_refused(self, task: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="takes no few-shot examples"):
            check_task(AccuracySuite(task=task, num_fewshot=3), data=write_known(tmp_path, task))
