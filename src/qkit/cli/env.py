"""`qkit env`: the backends' environments."""

from __future__ import annotations

import click

backend_names = click.argument("backends", metavar="[BACKEND]...", nargs=-1)
accelerator = click.option(
    "--accelerator",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Which pins: `auto` takes cuda where there is an NVIDIA GPU.",
)


def _device(asked: str) -> str:
    """Return the accelerator; an explicit one may be prepared on a machine that lacks it."""
    from qkit.hardware import detect_accelerator

    return detect_accelerator() if asked == "auto" else asked


@click.group()
def env() -> None:
    """Create, check and list the backends' environments.

    Every backend lives in a virtual environment of its own, because their pins exclude each other.
    QKIT_QUANTIZE_PYTHON, QKIT_SERVE_PYTHON and so on point a backend at an interpreter of your own.
    """


@env.command()
@backend_names
@accelerator
@click.option("--find-links", metavar="DIR", help="Folder of wheels to look in first.")
@click.option("--force", is_flag=True, help="Make it anew.")
def create(
    backends: tuple[str, ...], accelerator: str, find_links: str | None, force: bool
) -> None:
    """Make environments; those that are ready are left alone.

    Without a name: quantize and serve, which is all that most people need.
    """
    from rich.console import Console

    from qkit import environments

    device = _device(accelerator)
    console = Console(stderr=True, highlight=False)
    for backend in backends or environments.DEFAULT_BACKENDS:
        with console.status(f"making the {backend} environment ({device})"):
            made = environments.create(backend, device, find_links=find_links, force=force)
        click.echo(f"{backend:<10} {device:<5} {made.state:<10} {made.python}")


@env.command()
@backend_names
@accelerator
def check(backends: tuple[str, ...], accelerator: str) -> None:
    """Prove that environments are whole: pins installed, main module imports.

    Without a name: quantize, serve, and whatever else was made.
    """
    from qkit import environments

    device = _device(accelerator)
    for backend in backends or environments.made_or_default(device):
        versions = environments.check(backend, device)
        click.echo(f"{backend:<10} {device:<5} ok, {len(versions)} packages")


@env.command("list")
@accelerator
def list_(accelerator: str) -> None:
    """List the backends, what each is for, and the state of its environment."""
    from qkit import environments

    device = _device(accelerator)
    for backend, purpose in environments.BACKENDS.items():
        if not environments.runs_on(backend, device):
            click.echo(f"{backend:<10} {device:<5} {'-':<10} {purpose}")
            continue
        found = environments.find(backend, device)
        click.echo(f"{backend:<10} {device:<5} {found.state:<10} {purpose}")
        click.echo(f"{'':<27} {found.python}")
