"""Keeps lm-eval and the libraries below it from writing to the person's terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import lm_eval.api.metrics
import lm_eval.api.task
import lm_eval.evaluator

LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "transformers")
#: Resamples for the metrics that have no closed form of the standard error. lm-eval's own 100,000
#: take minutes and change its third digit.
BOOTSTRAP_ITERATIONS = 1000


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Let only errors through while the block runs: no log lines, progress bars or prints.

    Not for several threads at once: it changes module attributes and puts them back.
    """
    import datasets  # noqa: PLC0415  # takes seconds

    bars = not datasets.are_progress_bars_disabled()
    silent_bootstrap = partial(_silently, lm_eval.api.metrics.bootstrap_stderr)
    with contextlib.ExitStack() as stack:
        for name in LOGGERS:
            stack.enter_context(_errors_only(logging.getLogger(name)))
        replace = partial(_replaced, stack)
        replace(lm_eval.api.task, "tqdm", partial(lm_eval.api.task.tqdm, disable=True))
        replace(lm_eval.api.metrics, "bootstrap_stderr", silent_bootstrap)
        # These call git in the current folder and its parent, which complains on our terminal.
        replace(lm_eval.evaluator, "get_git_commit_hash", lambda: None)
        replace(lm_eval.evaluator, "add_env_info", lambda _results: None)
        if bars:
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


@contextlib.contextmanager
def _errors_only(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _replaced(stack: contextlib.ExitStack, module: ModuleType, name: str, value: Any) -> None:
    """Set a module's attribute until the stack is closed."""
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _silently(
    bootstrap: Callable[..., float], f: Callable[..., float], xs: Sequence[Any], iters: int
) -> float:
    """Run lm-eval's bootstrap in this process, without what it prints."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return bootstrap(f, xs, iters=iters)
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
