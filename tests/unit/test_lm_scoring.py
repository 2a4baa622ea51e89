"""The LM class against a fake server whose log-probabilities are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.question_model import write_question_model
from fakes.scoring_server import MODEL, ScoringServer, best, logprob
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.lm import ServedLM, load_tokenizer
from qkit.evaluate.option_plan import in_chunks
from qkit.evaluate.prefix_order import minimum_prefill

QUESTIONS = [f"Question {n}: which of these is fact {n * n}?\nAnswer:" for n in range(12)]
LETTERS = (" A", " B", " C", " D")
PHRASES = (" one long answer", " another answer", " the third")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_question_model(tmp_path_factory.mktemp("model") / "checkpoint", QUESTIONS)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(checkpoint)


def lm_on(server: ScoringServer, tokenizer: Any, **settings: Any) -> ServedLM:
    return ServedLM(base_url=server.url, model=MODEL, tokenizer=tokenizer, **settings)


def instances(kind: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, i, ("task", i, 1)) for i, args in enumerate(arguments)]


def pairs(contexts: Sequence[str], options: Sequence[str]) -> list[Instance]:
    return instances("loglikelihood", [(c, o) for c in contexts for o in options])


def expected(tokenizer: Any, context: str, option: str) -> tuple[float, bool]:
    before = tokenizer(context, add_special_tokens=False).input_ids
    total, greedy = 0.0, True
    for token in tokenizer(context + option, add_special_tokens=False).input_ids[len(before) :]:
        total += logprob(before, token)
        greedy = greedy and logprob(before, token) == logprob(before, best(before))
        before = [*before, token]
    return total, greedy


def lm_eval_client(server: ScoringServer, checkpoint: Path, max_length: int) -> Any:
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=MODEL,
        tokenizer=str(checkpoint),
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_length=max_length,
    )


class TestOptions:
    def test_one_request_a_question_and_exact_scores(self, tokenizer: Any) -> None:
        with ScoringServer() as server:
            answers = lm_on(server, tokenizer).loglikelihood(pairs(QUESTIONS, LETTERS))
        assert answers == [expected(tokenizer, q, o) for q in QUESTIONS for o in LETTERS]
        assert len(server.bodies) == len(QUESTIONS)
        assert all(len(body["logprob_token_ids"]) == 4 for body in server.bodies)

    def test_options_of_several_tokens_are_exact_too(self, tokenizer: Any) -> None:
        options = (*PHRASES, " A")
        with ScoringServer() as server:
            answers = lm_on(server, tokenizer).loglikelihood(pairs(QUESTIONS[:3], options))
        wanted = [expected(tokenizer, q, o) for q in QUESTIONS[:3] for o in options]
        assert [a[0] for a in answers] == pytest.approx([w[0] for w in wanted], rel=1e-12)
        assert [a[1] for a in answers] == [w[1] for w in wanted]
        assert len(server.bodies) == 3 * (len(PHRASES) + 1)

    def test_a_context_is_computed_once_for_options_of_several_tokens(self, tokenizer: Any) -> None:
        shots = "".join(q + o for q, o in zip(QUESTIONS, PHRASES * 4, strict=True))
        contexts = [f"{shots}\n\nLast question {n}?\nAnswer:" for n in range(6)]
        asked = pairs(contexts, (" AB", " CD", " E"))
        with ScoringServer() as server:
            answers = lm_on(server, tokenizer).loglikelihood(asked)
        with ScoringServer(caches_prefixes=False) as other:
            whole = lm_on(other, tokenizer).loglikelihood(asked)
        assert [a[0] for a in answers] == pytest.approx([w[0] for w in whole], rel=1e-12)
        assert [a[1] for a in answers] == [w[1] for w in whole]
        assert server.prefilled <= 1.02 * minimum_prefill(
            [body["prompt"] for body in server.bodies], server.block_size
        )
        assert other.prefilled > 5 * server.prefilled

    def test_work_done_in_chunks_gives_the_same(
        self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = pairs(QUESTIONS, (*PHRASES, *LETTERS))
        with ScoringServer() as server:
            at_once = lm_on(server, tokenizer).loglikelihood(asked)
            monkeypatch.setattr(
                "qkit.evaluate.lm.in_chunks", lambda options: in_chunks(options, most=100)
            )
            assert lm_on(server, tokenizer).loglikelihood(asked) == at_once

    def test_a_context_of_spaces_alone_follows_the_prefix_token(self, tokenizer: Any) -> None:
        with ScoringServer() as server:
            lm_on(server, tokenizer).loglikelihood(pairs(["  "], [" A"]))
        assert server.bodies[0]["prompt"][0] == tokenizer.eos_token_id

    def test_equal_questions_are_asked_once(self, tokenizer: Any) -> None:
        with ScoringServer() as server:
            answers = lm_on(server, tokenizer).loglikelihood(pairs(QUESTIONS[:1] * 5, LETTERS))
        assert len(server.bodies) == 1
        assert answers == answers[:4] * 5

    def test_the_greedy_option_is_known(self, tokenizer: Any) -> None:
        context = QUESTIONS[0]
        token = best(tokenizer(context, add_special_tokens=False).input_ids)
        with ScoringServer() as server:
            encoded = (("", ""), tokenizer(context).input_ids, [token])
            other = (("", ""), tokenizer(context).input_ids, [(token + 1) % 256])
            lm = lm_on(server, tokenizer)
            assert [a[1] for a in lm._loglikelihood_tokens([encoded, other])] == [True, False]

    def test_more_options_than_a_request_takes_are_split(self, tokenizer: Any) -> None:
        context = tokenizer(QUESTIONS[0]).input_ids
        encoded = [(("", ""), context, [token]) for token in range(300)]
        with ScoringServer() as server:
            answers = lm_on(server, tokenizer)._loglikelihood_tokens(encoded)
        assert [a[0] for a in answers] == [logprob(context, token) for token in range(300)]
        assert len(server.bodies) == 3

    def test_without_context_the_prefix_token_stands_there(self, tokenizer: Any) -> None:
        with ScoringServer() as server:
            lm = lm_on(server, tokenizer)
            lm.loglikelihood(pairs([""], [" A"]))
        assert server.bodies[0]["prompt"] == [tokenizer.eos_token_id]

    def test_an_answer_that_adds_no_token_is_an_error(self, tokenizer: Any) -> None:
        with ScoringServer() as server, pytest.raises(MeasurementError, match="adds no token"):
            lm_on(server, tokenizer).loglikelihood(pairs(QUESTIONS[:1], [""]))

    def test_sampling_is_sent_explicitly(self, tokenizer: Any) -> None:
        with ScoringServer() as server:
            lm_on(server, tokenizer).loglikelihood(pairs(QUESTIONS[:1], LETTERS))
        body = server.bodies[0]
        assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0, 1, 1)
        assert body["max_tokens"] == 1


class TestAgreementWithLmEval:
    """The same log-likelihoods as lm-eval's own client gives on the same server."""

    @pytest.mark.parametrize("options", [LETTERS, PHRASES, (" A", "\n\nB", "  x")])
    def test_options(self, checkpoint: Path, tokenizer: Any, options: tuple[str, ...]) -> None:
        contexts = [*QUESTIONS[:3], QUESTIONS[3] + "  ", QUESTIONS[4] + " \n"]
        with ScoringServer() as server:
            ours = lm_on(server, tokenizer).loglikelihood(pairs(contexts, options))
            theirs = lm_eval_client(server, checkpoint, 4096).loglikelihood(
                pairs(contexts, options)
            )
        assert ours == theirs

    def test_rolling_windows(self, checkpoint: Path, tokenizer: Any) -> None:
        texts = instances("loglikelihood_rolling", [("".join(QUESTIONS[:n]),) for n in (1, 5, 12)])
        with ScoringServer(max_model_len=64) as server:
            lm = lm_on(server, tokenizer)
            ours = lm.loglikelihood_rolling(texts)
            theirs = lm_eval_client(server, checkpoint, 64).loglikelihood_rolling(texts)
        assert ours == pytest.approx(theirs, rel=1e-12)
        assert all(len(body["prompt"]) < 64 for body in server.bodies)
        assert lm.usage.requests > 3

    def test_generation(self, checkpoint: Path, tokenizer: Any) -> None:
        settings = {"until": ["m", "\n\n"], "max_gen_toks": 9, "do_sample": False}
        asked = instances("generate_until", [(q, dict(settings)) for q in QUESTIONS])
        with ScoringServer() as server:
            ours = lm_on(server, tokenizer).generate_until(asked)
            sent = server.bodies[0]
            theirs = lm_eval_client(server, checkpoint, 4096).generate_until(asked)
        assert ours == theirs
        assert (sent["max_tokens"], sent["stop"], sent["temperature"]) == (9, ["m", "\n\n"], 0)
        assert "do_sample" not in sent


class TestGeneration:
    def test_repeats_of_a_sampled_answer_are_different_draws(self, tokenizer: Any) -> None:
        settings = {"until": [], "temperature": 0.7, "top_p": 0.9, "max_gen_toks": 4}
        asked = instances("generate_until", [(QUESTIONS[0], dict(settings))] * 3)
        with ScoringServer() as server:
            lm_on(server, tokenizer, seed=7).generate_until(asked)
        assert sorted(body["seed"] for body in server.bodies) == [7, 8, 9]
        assert {body["top_p"] for body in server.bodies} == {0.9}

    def test_the_chat_template_is_the_tokenizers(self, tokenizer: Any) -> None:
        with ScoringServer() as server:
            lm = lm_on(server, tokenizer)
        turn = [{"role": "user", "content": "Why?"}]
        assert lm.apply_chat_template(turn) == (
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
        )


class TestPrefixes:
    def test_the_server_computes_no_shared_block_twice(self, tokenizer: Any) -> None:
        shots = [
            "".join(q + a for q, a in zip(QUESTIONS, o * 3, strict=True))
            for o in ([" A", " B", " C", " D"], [" D", " C", " B", " A"], [" B", " B", " A", " A"])
        ]
        contexts = [shot + f"\n\nLast question {n}?\nAnswer:" for n in range(20) for shot in shots]
        with ScoringServer(delay_s=0.005) as server:
            lm = lm_on(server, tokenizer)
            lm.loglikelihood(pairs(contexts, LETTERS))
        prompts = [body["prompt"] for body in server.bodies]
        least = minimum_prefill(prompts, server.block_size)
        sent = sum(map(len, prompts))
        assert server.prefilled <= 1.02 * least
        assert sent > 5 * least
        assert server.most_in_flight > 8
        assert lm.usage.prompt_tokens == sent
        assert lm.usage.cached_tokens == sent - server.prefilled
        assert lm.usage.requests == len(contexts)

    def test_progress_counts_requests(self, tokenizer: Any) -> None:
        seen: list[tuple[int, int]] = []
        with ScoringServer() as server:
            lm = lm_on(
                server, tokenizer, on_progress=lambda done, total: seen.append((done, total))
            )
            lm.loglikelihood(pairs(QUESTIONS, LETTERS))
            lm.loglikelihood(pairs(QUESTIONS[:1], PHRASES))
        assert seen[:12] == [(n, 12) for n in range(1, 13)]
        assert seen[12:] == [(n, 15) for n in range(13, 16)]


class TestServedLength:
    def test_a_longer_prompt_is_an_error_before_anything_is_sent(self, tokenizer: Any) -> None:
        with ScoringServer(max_model_len=8) as server:
            lm = lm_on(server, tokenizer)
            with pytest.raises(InputError) as caught:
                lm.loglikelihood(pairs([*QUESTIONS, "Why?"], LETTERS))
            assert not server.bodies
        needed = max(len(tokenizer(q).input_ids) for q in QUESTIONS) + 1
        assert "12 of 13 prompts do not fit the served length of 8 tokens" in str(caught.value)
        assert f"max_model_len {needed} or more" in str(caught.value)

    def test_a_prompt_that_just_fits_is_scored(self, tokenizer: Any) -> None:
        length = len(tokenizer(QUESTIONS[0]).input_ids)
        with ScoringServer(max_model_len=length + 1) as server:
            assert lm_on(server, tokenizer).loglikelihood(pairs(QUESTIONS[:1], [" A"]))

    def test_room_for_generation_is_required(self, tokenizer: Any) -> None:
        asked = instances("generate_until", [(QUESTIONS[0], {"max_gen_toks": 100})])
        with ScoringServer(max_model_len=64) as server, pytest.raises(InputError, match="fit"):
            lm_on(server, tokenizer).generate_until(asked)

    def test_a_length_of_the_callers_own_counts_where_it_is_shorter(self, tokenizer: Any) -> None:
        with ScoringServer(max_model_len=64) as server:
            assert lm_on(server, tokenizer, max_model_len=32).max_length == 32
            assert lm_on(server, tokenizer, max_model_len=128).max_length == 64

    def test_an_unknown_length_is_an_error(self, tokenizer: Any) -> None:
        with ScoringServer(max_model_len=None) as server:
            with pytest.raises(InputError, match="how many tokens"):
                lm_on(server, tokenizer)
            assert lm_on(server, tokenizer, max_model_len=99).max_length == 99
