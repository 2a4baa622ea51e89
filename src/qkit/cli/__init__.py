"""The command line: one command a file, loaded only when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from qkit import __version__
from qkit.errors import EXIT_INTERRUPTED, QkitError, nearest

#: Name to where it is and what it does; `qkit --help` needs nothing but this table.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("qkit.cli.run:run", "Do a whole recipe: quantize, serve, measure, print the matrix."),
    "plan": ("qkit.cli.plan:plan", "Say in a second what fits, what runs and what is in the way."),
    "quantize": ("qkit.cli.quantize:quantize", "Make quantized variants of a checkpoint."),
    "eval": ("qkit.cli.eval:evaluate", "Measure variants, or a running server."),
    "matrix": ("qkit.cli.matrix:matrix", "Print the matrix of a run again."),
    "compare": ("qkit.cli.compare:compare", "Compare any two results, question by question."),
    "serve": ("qkit.cli.serve:serve", "Serve a checkpoint with vLLM until interrupted."),
    "env": ("qkit.cli.env:env", "Create, check and list the backends' environments."),
    "recipes": ("qkit.cli.recipes:recipes", "List, print and validate recipes."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when help is printed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands' names in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; name the nearest one where there is none."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; print what a person can act on without a traceback."""
        try:
            return super().invoke(ctx)
        except QkitError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo(
                "interrupted; what was finished is kept, the same command goes on from there",
                err=True,
            )
            ctx.exit(EXIT_INTERRUPTED)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="qkit")
def cli() -> None:
    """Find out which quantized form of a Qwen2.5 checkpoint to serve.

    `qkit run demo` shows the whole way on any machine: it makes AWQ, GPTQ, FP8 and SmoothQuant
    variants of a tiny checkpoint, serves each one in vLLM, measures accuracy, latency, throughput
    and memory, and prints one matrix against BF16.
    """


def main() -> None:
    """Entry point of the `qkit` program."""
    from qkit.processes import interruptible

    # Their warnings (PyTorch not found, each retry) say nothing that qkit's own messages do not.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    with interruptible():
        cli.main(prog_name="qkit", args=sys.argv[1:])
