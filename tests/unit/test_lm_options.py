"""BOS, truncation, system prompt, drawn documents, and concurrency that follows the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.question_model import write_question_model
from fakes.scoring_server import MODEL, ScoringServer
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from qkit.errors import InputError
from qkit.evaluate.accuracy import run_accuracy
from qkit.evaluate.adaptive import (
    LEAST,
    MOST,
    START,
    ConcurrencyLimit,
    Load,
    starting_limit,
)
from qkit.evaluate.drawing import draw
from qkit.evaluate.harness_results import bootstrap_stderr, config_hash
from qkit.evaluate.lm import ServedLM, load_tokenizer
from qkit.evaluate.prefix_order import minimum_prefill
from qkit.measurements import AccuracyResult
from qkit.suites import AccuracySuite

BOS = "<|endoftext|>"
TEXTS = [f"Question {n}: which of these is fact {n * n}?\nAnswer:" for n in range(12)]
OPTIONS = (" A", " B", " one long answer")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_question_model(tmp_path_factory.mktemp("plain") / "checkpoint", TEXTS)


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer puts BOS before every text, as Llama's and Gemma's do."""
    folder = write_question_model(tmp_path_factory.mktemp("bos") / "checkpoint", TEXTS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(
        config.replace("{", f'{{"bos_token": "{BOS}", ', 1)
        if '"bos_token"' not in config
        else config.replace('"bos_token": null', f'"bos_token": "{BOS}"')
    )
    return folder


def pairs(contexts: list[str], options: tuple[str, ...] = OPTIONS) -> list[Instance]:
    arguments = [(c, o) for c in contexts for o in options]
    return [
        Instance("loglikelihood", {}, a, i, ("task", i // len(options), 1))
        for i, a in enumerate(arguments)
    ]


def texts_of(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, a, i, ("task", i, 1)) for i, a in enumerate(arguments)]


def lm_eval_client(server: ScoringServer, folder: Path, **settings: Any) -> Any:
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=MODEL,
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        num_concurrent=4,
        **settings,
    )


def our_lm(server: ScoringServer, folder: Path, **settings: Any) -> ServedLM:
    return ServedLM(base_url=server.url, model=MODEL, tokenizer=load_tokenizer(folder), **settings)


class TestBos:
    def test_a_tokenizer_that_adds_bos_is_followed(self, with_bos: Path) -> None:
        tokenizer = load_tokenizer(with_bos)
        bos = tokenizer.bos_token_id
        assert tokenizer(TEXTS[0]).input_ids[0] == bos
        with ScoringServer() as server:
            lm = our_lm(server, with_bos)
            lm.loglikelihood(pairs(TEXTS[:2]))
            lm.generate_until(texts_of("generate_until", [(TEXTS[0], {"max_gen_toks": 2})]))
            lm.loglikelihood_rolling(texts_of("loglikelihood_rolling", [(TEXTS[0],)]))
        assert lm.add_bos_token
        assert all(body["prompt"][0] == bos for body in server.bodies)
        options = [body["prompt"] for body in server.bodies if "logprob_token_ids" in body]
        assert options == [tokenizer(text).input_ids for text in TEXTS[:2]]

    def test_a_text_that_begins_with_bos_gets_no_second_one(self, with_bos: Path) -> None:
        with ScoringServer() as server:
            lm = our_lm(server, with_bos)
            assert lm.tok_encode(BOS + TEXTS[0]) == lm.tok_encode(TEXTS[0])

    def test_scores_are_those_of_lm_evals_client_with_bos(self, with_bos: Path) -> None:
        rolling = texts_of("loglikelihood_rolling", [("".join(TEXTS),)])
        with ScoringServer(max_model_len=128) as server:
            ours = our_lm(server, with_bos)
            theirs = lm_eval_client(server, with_bos, max_length=128, add_bos_token=True)
            assert ours.loglikelihood(pairs(TEXTS)) == theirs.loglikelihood(pairs(TEXTS))
            assert ours.loglikelihood_rolling(rolling) == pytest.approx(
                theirs.loglikelihood_rolling(rolling), rel=1e-12
            )

    def test_it_can_be_left_out_and_asked_for(self, with_bos: Path, checkpoint: Path) -> None:
        with ScoringServer() as server:
            assert not our_lm(server, with_bos, add_bos_token=False).add_bos_token
            assert not our_lm(server, checkpoint).add_bos_token
            tokenizer = load_tokenizer(checkpoint)
            tokenizer.bos_token = None
            with pytest.raises(InputError, match="no BOS token"):
                ServedLM(base_url=server.url, model=MODEL, tokenizer=tokenizer, add_bos_token=True)


class TestTruncation:
    def test_cut_prompts_score_as_lm_evals_client_cuts_them(self, checkpoint: Path) -> None:
        long = ["".join(TEXTS[:n]) for n in (1, 3, 12)]
        asked = texts_of("generate_until", [(text, {"max_gen_toks": 8}) for text in long])
        with ScoringServer(max_model_len=64) as server:
            ours = our_lm(server, checkpoint, truncate=True)
            theirs = lm_eval_client(server, checkpoint, max_length=64)
            assert ours.loglikelihood(pairs(long)) == theirs.loglikelihood(pairs(long))
            assert ours.generate_until(asked) == theirs.generate_until(asked)
        assert max(len(body["prompt"]) for body in server.bodies) <= 63

    def test_cut_documents_are_listed(self, checkpoint: Path) -> None:
        with ScoringServer(max_model_len=64) as server:
            lm = our_lm(server, checkpoint, truncate=True)
            lm.loglikelihood(pairs([TEXTS[0], "".join(TEXTS)]))
        whole = len(load_tokenizer(checkpoint)("".join(TEXTS) + OPTIONS[2]).input_ids)
        assert lm.cut_tokens == {("task", 1): whole - 63}

    def test_an_answer_longer_than_the_served_length_is_still_refused(
        self, checkpoint: Path
    ) -> None:
        with ScoringServer(max_model_len=32) as server:
            lm = our_lm(server, checkpoint, truncate=True)
            with pytest.raises(InputError, match="answers alone are longer"):
                lm.loglikelihood(pairs([TEXTS[0]], (" " + "".join(TEXTS),)))
        assert not server.bodies

    def test_a_suite_marks_them(self, checkpoint: Path) -> None:
        with ScoringServer(max_model_len=420) as server:
            suite = AccuracySuite(task="mmlu_dev", limit=20, truncate=True)
            result = score(server, checkpoint, suite)
        cut = [sample for sample in result.samples if sample.truncated_tokens]
        assert 0 < result.truncated == len(cut) < 20
        (mark,) = (mark for mark in result.marks if mark.startswith("truncated"))
        assert mark.startswith(f"truncated: {len(cut)} questions lost up to ")
        assert f"{max(s.truncated_tokens for s in cut):,} tokens" in mark


def score(server: ScoringServer, checkpoint: Path, suite: AccuracySuite) -> AccuracyResult:
    return run_accuracy(
        suite, base_url=server.url, model=MODEL, tokenizer_path=checkpoint, max_model_len=None
    )


class TestTemplate:
    def test_system_prompt_and_examples_are_turns(self, checkpoint: Path) -> None:
        tokenizer = load_tokenizer(checkpoint)
        prompts = {}
        for multiturn in (True, False):
            suite = AccuracySuite(
                task="mmlu_dev", limit=1, num_fewshot=2, chat_template=True,
                system_prompt="Answer with a letter.", fewshot_as_multiturn=multiturn,
            )  # fmt: skip
            with ScoringServer(max_model_len=8192) as server:
                result = score(server, checkpoint, suite)
            assert result.system_prompt == "Answer with a letter."
            assert result.fewshot_as_multiturn is multiturn
            assert result.template_hash
            prompts[multiturn] = tokenizer.decode(server.bodies[0]["prompt"])
        for prompt in prompts.values():
            assert "<|im_start|>system\nAnswer with a letter." in prompt
        assert prompts[True].count("<|im_start|>user") == 3
        assert prompts[True].count("<|im_start|>assistant") == 3
        assert prompts[False].count("<|im_start|>user") == 1

    def test_without_a_template_the_system_prompt_stands_first(self, checkpoint: Path) -> None:
        suite = AccuracySuite(task="mmlu_dev", limit=1, system_prompt="Answer with a letter.")
        with ScoringServer(max_model_len=8192) as server:
            score(server, checkpoint, suite)
        prompt = load_tokenizer(checkpoint).decode(server.bodies[0]["prompt"])
        assert prompt.startswith("Answer with a letter.")


class TestDraw:
    def test_subjects_are_drawn_evenly(self) -> None:
        subjects = ["a"] * 100 + ["b"] * 10 + ["c"] * 3
        drawn = draw(subjects, 12, seed="0:t")
        counts = [sum(subjects[i] == s for i in drawn) for s in "abc"]
        assert sorted(counts) in ([3, 4, 5], [3, 4, 5])
        assert drawn == sorted(set(drawn))

    def test_the_seed_and_the_task_choose(self) -> None:
        one, same, other = (draw([None] * 500, 50, seed=s) for s in ("0:t", "0:t", "1:t"))
        assert one == same != other
        assert one != list(range(50))
        assert max(one) > 300

    def test_no_more_than_there_are(self) -> None:
        assert draw([None] * 3, 5, seed="0") == [0, 1, 2]

    def test_every_variant_is_asked_the_same_and_the_row_is_marked(self, checkpoint: Path) -> None:
        results = []
        for seed in (0, 0, 1):
            with ScoringServer(max_model_len=8192) as server:
                suite = AccuracySuite(task="mmlu_dev", limit=57, seed=seed)
                results.append(score(server, checkpoint, suite))
        one, same, other = ({s.doc_hash for s in r.samples} for r in results)
        assert one == same
        assert len(one - other) > 20
        assert results[0].marks == ("limit: 57, 57 of 281 questions drawn with seed 0",)
        assert results[0].headline.n == 57


class TestConcurrency:
    def test_it_settles_near_what_the_server_runs(self) -> None:
        for slots in (16, 64, 200):
            limit = ConcurrencyLimit(32)
            seen = []
            for _ in range(60):
                in_flight = limit.value
                running = min(in_flight, slots)
                limit.observe(Load(running, in_flight - running), in_flight)
                seen.append(limit.value)
            assert all(slots <= value <= 1.5 * slots for value in seen[30:])

    def test_an_idle_client_does_not_grow(self) -> None:
        limit = ConcurrencyLimit(32)
        limit.observe(Load(5, 0), in_flight=5)
        assert limit.value == 32

    def test_bounds(self) -> None:
        limit = ConcurrencyLimit(32)
        for _ in range(20):
            limit.observe(Load(limit.value, 0), limit.value)
        assert limit.value == MOST
        for _ in range(40):
            limit.observe(Load(1, limit.value - 1), limit.value)
        assert limit.value == LEAST
        small = ConcurrencyLimit(4)
        small.observe(Load(1, 3), 4)
        assert small.value == 4

    def test_a_server_that_does_not_say_keeps_the_start(self) -> None:
        limit = ConcurrencyLimit(32)
        limit.observe(Load(), 32)
        assert limit.value == 32

    def test_replies_close_to_the_time_out_halve_it(self) -> None:
        limit = ConcurrencyLimit(64, timeout_s=100)
        limit.replied(30)
        limit.observe(Load(64, 0), 64)
        assert limit.value == 32
        limit.observe(Load(32, 0), 32)
        assert limit.value > 32

    @pytest.mark.parametrize(
        ("flags", "start"),
        [
            (("--max-num-seqs", "8"), 10),
            (("--enforce-eager", "--max-num-seqs=64"), 80),
            (("--max-num-seqs", "100000"), MOST),
            (("--max-num-seqs",), START),
            ((), START),
        ],
    )
    def test_it_starts_from_the_servers_own_limit(self, flags: tuple[str, ...], start: int) -> None:
        assert starting_limit(flags) == start

    def test_it_grows_on_a_real_client_without_computing_a_prefix_twice(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qkit.evaluate.scoring_client.LOAD_PERIOD_S", 0.02)
        shots = ["".join(TEXTS[i:] + TEXTS[:i]) for i in range(3)]
        contexts = [f"{shot}\n\nLast {n}?\nAnswer:" for n in range(60) for shot in shots]
        with ScoringServer(delay_s=0.02, slots=24) as server:
            our_lm(server, checkpoint, concurrency=2).loglikelihood(pairs(contexts, (" A", " B")))
        least = minimum_prefill([body["prompt"] for body in server.bodies], server.block_size)
        assert server.prefilled <= 1.1 * least
        assert 8 < server.most_in_flight <= 96  # of 180 that could go out at once


class TestResults:
    def test_a_bootstrap_gives_the_standard_error_of_a_mean(self) -> None:
        values = [float(n % 7) for n in range(400)]
        mean = sum(values) / 400
        closed = (sum((v - mean) ** 2 for v in values) / 399 / 400) ** 0.5
        found = bootstrap_stderr(values, lambda some: sum(some) / len(some))
        assert found == pytest.approx(closed, rel=0.08)
        assert found == bootstrap_stderr(values, lambda some: sum(some) / len(some))
        assert bootstrap_stderr([1.0], max) is None

    def test_a_tasks_hash_does_not_depend_on_where_it_lies(self) -> None:
        def config(folder: str, text: str, version: int = 1) -> dict[str, Any]:
            return {
                "task": "t",
                "doc_to_text": text,
                "dataset_path": f"{folder}/data",
                "process_docs": f"<function x at 0x{len(folder):x}> {folder}/utils.x",
                "metadata": {"version": version, "config_source": f"{folder}/t.yaml"},
            }

        here = config_hash(config("/a/b", "{{question}}"))
        assert here == config_hash(config("/home/me/c", "{{question}}"))
        assert here != config_hash(config("/a/b", "{{question}}?"))
        assert here != config_hash(config("/a/b", "{{question}}", version=2))
