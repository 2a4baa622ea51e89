"""lm-eval's language model, scored through a vLLM server.

lm-eval's own API client sends every answer option as a separate request that computes the whole
prompt again. Here the server reuses what options and questions share (`qkit.evaluate.option_plan`),
which gives the same log-likelihoods (tests/e2e/test_lm_agreement.py).
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
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.adaptive import START
from qkit.evaluate.encoding import PromptEncoder, first_difference, generation
from qkit.evaluate.fitting import cut_context, cut_prompt, require_fit
from qkit.evaluate.option_plan import Option, Part, in_chunks, plan_options, scores_of
from qkit.evaluate.scored_answers import ScoredAnswers
from qkit.evaluate.scoring_client import ScoringClient
from qkit.evaluate.scoring_requests import (
    Answer,
    GenerateRequest,
    PromptRequest,
    Request,
    ServedModel,
    TokenScore,
    Usage,
)

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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "the tokenizer does not load",
            where=path,
            detail=str(error),
            fix="give the folder of the checkpoint that is served (tokenizer.json beside it)",
        ) from error


class ServedLM(TemplateLM):  # type: ignore[misc]
    """A served model as lm-eval sees it.

    Tokenization of context and continuation is `TemplateLM`'s own. A prompt that does not fit the
    served length is an error before anything is sent, or, where that is asked for, loses its
    beginning and is listed in `cut_tokens`.

    Args:
        base_url: Root of the server, with or without `/v1`.
        model: Name the model is served under.
        tokenizer: The served checkpoint's tokenizer; see `load_tokenizer`.
        max_model_len: Served length in tokens; None asks the server.
        add_bos_token: Whether prompts begin with BOS; None does what the tokenizer does by itself,
            as lm-eval's own hf and vllm models do.
        truncate: Cut prompts over the served length at their beginning.
        scored: Answers that are there already, and where new ones are kept.
        concurrency: Requests in flight at first; their number follows the server's load.
        backwards: Send requests the other way round, so that other ones share a batch.
        timeout_s: Seconds of silence after which a request has failed.
        seed: Seed of generation with a temperature above 0.
        on_progress: Called after every request with those finished and all known so far.

    Attributes:
        usage: What was sent so far.
        resumed: Requests whose answers were there already.
        cut_tokens: Tokens a prompt lost, the most of any of its options, by (task, document).

    Raises:
        InputError: The server does not serve `model`, has another tokenizer, the served length is
            not known, or BOS is asked of a tokenizer that has none.
        ServerError: The server does not answer.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        tokenizer: Any,
        max_model_len: int | None = None,
        add_bos_token: bool | None = None,
        truncate: bool = False,
        scored: ScoredAnswers | None = None,
        concurrency: int = START,
        backwards: bool = False,
        timeout_s: float = 600.0,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.usage = Usage()
        self.resumed = 0
        self.cut_tokens: dict[tuple[str, int], int] = {}
        self._encoder = PromptEncoder(tokenizer, add_bos_token)
        self._truncate = truncate
        self._scored = scored
        self._seed = seed
        self._backwards = backwards
        self._on_progress = on_progress
        self._done = self._total = 0
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
            raise InputError(
                f"the server of {served.name!r} has another tokenizer: of a probe text, "
                + first_difference(ours, theirs),
                where=getattr(self.tokenizer, "name_or_path", None) or None,
                fix="give the tokenizer of the checkpoint that is served",
            )
        return served

    # ------------------------------------------------------------------------------ tokenization

    @property
    def add_bos_token(self) -> bool:
        """Whether prompts begin with BOS."""
        return self._encoder.add_bos

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
        """Return a text's token ids; BOS before them where prompts have it, but never twice."""
        return self._encoder.encode(string, bos=add_special_tokens)

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
            self._encoder.ahead(text for context, more in chunk for text in _texts(context, more))
            for request, (context, continuation) in zip(requests[start:], chunk, strict=False):
                encoded.append(self._fit(request, self._encode(context, continuation)))
        self._encoder.forget()
        return self._loglikelihood_tokens(encoded)

    def _encode(self, context: str, continuation: str) -> Encoded:
        pair = (context, continuation)
        if context:
            before, after = self._encode_pair(context, continuation)
            # Of a context of spaces alone none is left: they are taken to the continuation.
            return pair, before or [self.prefix_token_id], after
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens and tokens[0] == self.prefix_token_id:
            return (pair, tokens[:1], tokens[1:])
        return (pair, [self.prefix_token_id], tokens)

    def _fit(self, request: Instance, encoded: Encoded) -> Encoded:
        """Shorten a context to the served length where that is asked for, and list it."""
        text, context, continuation = encoded
        if self._truncate:
            context, cut = cut_context(context, continuation, self.max_length)
            self._list_cut(request, cut)
        return text, context, continuation

    def _list_cut(self, request: Instance, tokens: int) -> None:
        document = (str(request.task_name), int(request.doc_id))
        if tokens > self.cut_tokens.get(document, 0):
            self.cut_tokens[document] = tokens

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Encoded],
        **_unused: Any,
    ) -> list[tuple[float, bool]]:
        """Score encoded pairs of a context and what could follow it."""
        options: list[Option] = []
        for text, context, continuation in requests:
            if not continuation:
                raise MeasurementError(
                    f"the answer {text[1]!r} adds no token to its context",
                    fix="this task cannot be scored with this tokenizer",
                )
            options.append((tuple(context), tuple(continuation)))
        # Of all before any is sent, whichever way they are asked. The server generates a token
        # after each; a single token is not sent itself.
        self._require_fit(
            len(context) + len(option) + 1
            for context, option in dict.fromkeys((c, o if len(o) > 1 else ()) for c, o in options)
        )
        block_size = self._served.block_size if self._served.caches_prefixes else None
        totals: dict[int, tuple[float, bool]] = {}
        for numbers in in_chunks(options):
            planned = plan_options([options[number] for number in numbers], block_size)
            answers = self._ask([part.request for parts in planned for part in parts])
            for number, parts in zip(numbers, planned, strict=True):
                totals[number] = _total(scores_of(parts, answers))
        return [totals[number] for number in range(len(options))]

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
        asked = [window for document in windows for window in document]
        self._require_fit(len(window.prompt) + 1 for window in dict.fromkeys(asked))
        answers = self._ask(asked)
        return [
            sum(_total(scores_of([Part(window)], answers))[0] for window in document)
            if document
            else 0.0
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
            one = self._generation(request)
            repeat = seen[one] = seen.get(one, -1) + 1
            if repeat and one.temperature > 0:
                # A repeat of a sampled answer is another draw, not the same one.
                one = replace(one, seed=one.seed + repeat)
            asked.append(one)
        self._require_fit(len(one.prompt) + one.max_tokens for one in dict.fromkeys(asked))
        answers = self._ask(asked)
        return [str(answers[one]) for one in asked]

    def _generation(self, request: Instance) -> GenerateRequest:
        """Encode a prompt and read the task's settings."""
        asked = generation(self.tok_encode(str(request.args[0])), request.args[1], seed=self._seed)
        if self._truncate:
            prompt, cut = cut_prompt(list(asked.prompt), asked.max_tokens, self.max_length)
            self._list_cut(request, cut)
            asked = replace(asked, prompt=tuple(prompt))
        return asked

    # ----------------------------------------------------------------------------------- sending

    def _require_fit(self, lengths: Iterable[int]) -> None:
        """Refuse prompts that need more than the served length."""
        require_fit(
            list(lengths), self.max_length, where=self._client.base_url, truncate=self._truncate
        )

    def _ask(self, requests: Sequence[Request]) -> dict[Request, Answer]:
        """Answer requests; equal ones are sent once, those answered before not at all."""
        different = list(dict.fromkeys(requests))
        answers: dict[Request, Answer] = {}
        if self._scored is not None:
            for request in different:
                if (known := self._scored.get(request)) is not None:
                    answers[request] = known
        to_send = [request for request in different if request not in answers]
        self.resumed += len(answers)
        self._done += len(answers)
        self._total += len(different)

        def keep(index: int, answer: Answer) -> None:
            request = to_send[index]
            if self._scored is not None:
                self._scored.keep(request, answer)
            answers[request] = answer
            self._done += 1
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

        async def run() -> None:
            async with self._client as client:
                await client.answer_all(
                    to_send,
                    block_size=self._served.block_size,
                    caches_prefixes=self._served.caches_prefixes,
                    backwards=self._backwards,
                    on_answer=keep,
                )

        if to_send:
            asyncio.run(run())
        return answers


def _texts(context: str, continuation: str) -> tuple[str, str]:
    """Return the two texts that `TemplateLM._encode_pair` tokenizes."""
    return context + continuation, context.rstrip()


def _total(scores: Sequence[TokenScore]) -> tuple[float, bool]:
    """Return the sum of log-probabilities, in order, and whether every token was greedy."""
    return sum(score.logprob for score in scores), all(score.is_greedy for score in scores)
