"""lm-eval's language model, scored through a vLLM server.

lm-eval's own API client sends every answer option as a separate request that computes the whole
prompt again. Here all options of a question that are single tokens are one request, which gives
the same log-likelihoods (tests/e2e/test_lm_agreement.py) and lets the server reuse the prefixes
that questions share.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.scoring_client import ScoringClient
from qkit.evaluate.scoring_requests import (
    MAX_TOKEN_IDS,
    Answer,
    GenerateRequest,
    OptionRequest,
    PromptRequest,
    Request,
    ServedModel,
    TokenScore,
    Usage,
)

#: lm-eval's own default for tasks that do not say how much to generate.
DEFAULT_MAX_GEN_TOKS = 256
#: Pairs that are tokenized together; bounds the memory of long few-shot prompts.
ENCODE_CHUNK = 2048
#: Words, digits, spaces, code, other scripts, an emoji and ChatML's markers: tokenizers that agree
#: on all of this are taken for the same.
PROBE_TEXT = (
    "Answer: A\n\nThe 2,048 quick-brown foxes aren't  lazy;\tπ ≈ 3.14159 (approx.)\n"
    "def f(x):\n    return x**2  # naïve\n模型量化 измерение 🙂 <|im_start|>user\n<|endoftext|>"
)

#: Called with the number of finished requests and of all requests known so far.
OnProgress = Callable[[int, int], None]
Encoded = tuple[tuple[str, str], list[int], list[int]]


def load_tokenizer(path: Path) -> Any:
    """Load a checkpoint's tokenizer.

    Raises:
        InputError: The folder has none that loads.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # noqa: PLC0415  # takes seconds

    if not path.is_dir():
        raise InputError("the tokenizer's folder does not exist", where=path)
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "the tokenizer does not load",
            where=path,
            detail=str(error),
            fix="give the folder of the checkpoint that is served (tokenizer.json beside it)",
        ) from error


class ServedLM(TemplateLM):  # type: ignore[misc]
    """A served model as lm-eval sees it.

    Tokenization of context and continuation is `TemplateLM`'s own. A prompt that does not fit the
    served length is an error before anything is sent; nothing is truncated.

    Args:
        base_url: Root of the server, with or without `/v1`.
        model: Name the model is served under.
        tokenizer: The served checkpoint's tokenizer; see `load_tokenizer`.
        max_model_len: Served length in tokens; None asks the server.
        add_bos_token: Whether prompts begin with the tokenizer's special tokens.
        concurrency: Requests in flight.
        timeout_s: Seconds of silence after which a request has failed.
        seed: Seed of generation with a temperature above 0.
        on_progress: Called after every request with those finished and all known so far.

    Raises:
        InputError: The server does not serve `model`, has another tokenizer, or the served length
            is not known.
        ServerError: The server does not answer.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        tokenizer: Any,
        max_model_len: int | None = None,
        add_bos_token: bool = False,
        concurrency: int = 32,
        timeout_s: float = 600.0,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.usage = Usage()
        self._add_bos_token = add_bos_token
        self._seed = seed
        self._on_progress = on_progress
        self._done = self._total = 0
        self._encoded: dict[str, list[int]] = {}
        self._client = ScoringClient(
            base_url, model, concurrency=concurrency, timeout_s=timeout_s, usage=self.usage
        )
        self._served = asyncio.run(self._meet())
        length = max_model_len or self._served.max_model_len
        if length is None:
            raise InputError(
                "the server does not say how many tokens it serves",
                where=base_url,
                fix="give the length it was started with (max_model_len)",
            )
        if self._served.max_model_len is not None:
            length = min(length, self._served.max_model_len)
        self.max_length: int = length

    async def _meet(self) -> ServedModel:
        """Ask what is served and check that its tokenizer is ours."""
        async with self._client as client:
            served = await client.describe()
            theirs = await client.tokenize(PROBE_TEXT)
        ours = self.tok_encode(PROBE_TEXT, add_special_tokens=False)
        if theirs is not None and theirs != ours:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                min(len(ours), len(theirs)),
            )
            raise InputError(
                f"the server of {served.name!r} has another tokenizer: of a probe text, token "
                f"{at} is {_at(theirs, at)} there and {_at(ours, at)} here",
                where=getattr(self.tokenizer, "name_or_path", None) or None,
                fix="give the tokenizer of the checkpoint that is served",
            )
        return served

    # ------------------------------------------------------------------------------ tokenization

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without context: BOS, else EOS."""
        if self.tokenizer.bos_token_id is not None:
            return int(self.tokenizer.bos_token_id)
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name that lm-eval's request cache tells tokenizers apart by."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_unused: Any
    ) -> list[int]:
        """Return a text's token ids."""
        special = self._special_tokens(string) if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and (known := self._encoded.get(string)) is not None:
            return known
        encoding = self.tokenizer(string, add_special_tokens=special, return_attention_mask=False)
        return list(encoding["input_ids"])

    def _special_tokens(self, string: str) -> bool:
        """Whether to add special tokens: as asked for, but never a second BOS."""
        bos = self.tokenizer.bos_token
        return self._add_bos_token and not (bos and string.startswith(bos))

    def _encode_ahead(self, strings: Iterable[str]) -> None:
        """Tokenize many texts at once, on all cores; `tok_encode` then only looks them up."""
        self._encoded.clear()
        if self._add_bos_token:
            return
        texts = list(dict.fromkeys(strings))
        if texts:
            ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
            self._encoded.update(zip(texts, ids["input_ids"], strict=True))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the tokenizer's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # ----------------------------------------------------------------------------------- scoring

    def loglikelihood(
        self,
        requests: list[Instance],
        disable_tqdm: bool = True,  # noqa: ARG002  # lm-eval's signature
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of each (context, continuation)."""
        pairs = [(str(request.args[0]), str(request.args[1])) for request in requests]
        encoded: list[Encoded] = []
        for start in range(0, len(pairs), ENCODE_CHUNK):
            chunk = pairs[start : start + ENCODE_CHUNK]
            self._encode_ahead(text for context, more in chunk for text in _texts(context, more))
            encoded += [self._encode(context, continuation) for context, continuation in chunk]
        self._encoded.clear()
        return self._loglikelihood_tokens(encoded)

    def _encode(self, context: str, continuation: str) -> Encoded:
        pair = (context, continuation)
        if context:
            return (pair, *self._encode_pair(context, continuation))
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens and tokens[0] == self.prefix_token_id:
            return (pair, tokens[:1], tokens[1:])
        return (pair, [self.prefix_token_id], tokens)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Encoded],
        **_unused: Any,
    ) -> list[tuple[float, bool]]:
        """Score encoded pairs: one request per context for options of one token, else one each."""
        options: dict[tuple[int, ...], dict[int, None]] = {}
        contexts = [tuple(context) for _, context, _ in requests]
        for (text, _, continuation), context in zip(requests, contexts, strict=True):
            if not continuation:
                raise MeasurementError(
                    f"the answer {text[1]!r} adds no token to its context",
                    fix="this task cannot be scored with this tokenizer",
                )
            if len(continuation) == 1:
                options.setdefault(context, {})[continuation[0]] = None
        grouped = {
            context: [
                OptionRequest(context, tuple(ids)[start : start + MAX_TOKEN_IDS])
                for start in range(0, len(ids), MAX_TOKEN_IDS)
            ]
            for context, ids in options.items()
        }
        whole = [
            None if len(continuation) == 1 else PromptRequest((*c, *continuation), len(c))
            for (_, _, continuation), c in zip(requests, contexts, strict=True)
        ]
        answers = self._ask(
            [*(r for parts in grouped.values() for r in parts), *filter(None, whole)]
        )
        single = {
            (context, token): score
            for context, parts in grouped.items()
            for part in parts
            for token, score in zip(part.token_ids, _scores(answers[part]), strict=True)
        }
        results = []
        for (_, _, continuation), context, prompt in zip(requests, contexts, whole, strict=True):
            if prompt is None:
                score = single[context, continuation[0]]
                results.append((score.logprob, score.is_greedy))
            else:
                results.append(_total(answers[prompt]))
        return results

    def loglikelihood_rolling(
        self,
        requests: list[Instance],
        disable_tqdm: bool = True,  # noqa: ARG002  # lm-eval's signature
    ) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of the served length.

        The windows are those of lm-eval's own API client at the same length.
        """
        windows: list[list[PromptRequest]] = []
        for request in requests:
            tokens = self.tok_encode(str(request.args[0]))
            pairs = get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                # One token stands before the window, and the server generates one after it.
                max_seq_len=self.max_length - 2,
                context_len=1,
            )
            windows.append(
                [
                    PromptRequest((*context, *continuation), len(context))
                    for context, continuation in map(make_disjoint_window, pairs)
                ]
            )
        answers = self._ask([window for document in windows for window in document])
        return [
            sum(_total(answers[window])[0] for window in document) if document else 0.0
            for document in windows
        ]

    def generate_until(
        self,
        requests: list[Instance],
        disable_tqdm: bool = True,  # noqa: ARG002  # lm-eval's signature
    ) -> list[str]:
        """Return the text generated after each context, up to a stop sequence."""
        asked: list[GenerateRequest] = []
        seen: dict[GenerateRequest, int] = {}
        for request in requests:
            one = self._generation(str(request.args[0]), dict(request.args[1]))
            repeat = seen[one] = seen.get(one, -1) + 1
            if repeat and one.temperature > 0:
                # A repeat of a sampled answer is another draw, not the same one.
                one = replace(one, seed=one.seed + repeat)
            asked.append(one)
        answers = self._ask(asked)
        return [str(answers[one]) for one in asked]

    def _generation(self, context: str, settings: dict[str, Any]) -> GenerateRequest:
        """Read a task's generation settings the way lm-eval's own API client does."""
        settings.pop("do_sample", None)
        fallback = settings.pop("max_gen_toks", DEFAULT_MAX_GEN_TOKS)
        return GenerateRequest(
            prompt=tuple(self.tok_encode(context)),
            max_tokens=int(settings.pop("max_tokens", fallback)),
            temperature=float(settings.pop("temperature", 0)),
            stop=tuple(handle_stop_sequences(settings.pop("until", None), None)),
            seed=self._seed,
            extra=tuple(sorted(settings.items())),
        )

    # ----------------------------------------------------------------------------------- sending

    def _ask(self, requests: Sequence[Request]) -> dict[Request, Answer]:
        """Answer requests; equal ones are sent once."""
        different = list(dict.fromkeys(requests))
        self._require_fit(different)
        answers: dict[Request, Answer] = {}
        self._total += len(different)

        def keep(index: int, answer: Answer) -> None:
            answers[different[index]] = answer
            self._done += 1
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

        async def run() -> None:
            async with self._client as client:
                await client.answer_all(
                    different, block_size=self._served.block_size, on_answer=keep
                )

        if different:
            asyncio.run(run())
        return answers

    def _require_fit(self, requests: Sequence[Request]) -> None:
        """Refuse prompts that leave no room for what is generated after them."""
        needed = [
            len(r.prompt) + (r.max_tokens if isinstance(r, GenerateRequest) else 1)
            for r in requests
        ]
        over = [length for length in needed if length > self.max_length]
        if over:
            raise InputError(
                f"{len(over)} of {len(needed)} prompts do not fit the served length of "
                f"{self.max_length} tokens; the longest needs {max(over)}",
                where=self._client.base_url,
                fix=f"serve with max_model_len {max(over)} or more, or ask for fewer few-shot "
                "examples (nothing is truncated silently)",
            )


def _texts(context: str, continuation: str) -> tuple[str, str]:
    """Return the two texts that `TemplateLM._encode_pair` tokenizes."""
    return context + continuation, context.rstrip()


def _scores(answer: Answer) -> tuple[TokenScore, ...]:
    if isinstance(answer, str):
        raise TypeError("a text is no score")
    return answer


def _total(answer: Answer) -> tuple[float, bool]:
    """Return the sum of log-probabilities, in order, and whether every token was greedy."""
    scores = _scores(answer)
    return sum(score.logprob for score in scores), all(score.is_greedy for score in scores)


def _at(tokens: Sequence[int], position: int) -> str:
    return str(tokens[position]) if position < len(tokens) else "missing"
