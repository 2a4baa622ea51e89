"""`qkit serve`: serve a checkpoint as the measurements do."""

from __future__ import annotations

import time
from pathlib import Path

import click

from qkit.cli import options


@click.command()
@click.argument("variant", metavar="VARIANT")
@options.recipe
@options.accelerator
@click.option("--port", type=click.IntRange(1, 65535), help="Default: a free one.")
@click.option("--log", type=click.Path(path_type=Path), help="Default: server.log beside it.")
@options.wait
def serve(
    variant: str,
    recipe_name: str | None,
    accelerator: str | None,
    port: int | None,
    log: Path | None,
    wait_s: float,
) -> None:
    """Serve a checkpoint with vLLM on 127.0.0.1, with the recipe's settings, until interrupted.

    VARIANT is a checkpoint folder, or the name of a variant of the recipe's run, such as `awq`.
    """
    from rich.console import Console

    from qkit import environments
    from qkit.checkpoint import resolve_model
    from qkit.errors import InputError
    from qkit.hardware import describe, detect_accelerator
    from qkit.locks import accelerator_lock_path, lock
    from qkit.recipe import BASELINE
    from qkit.server import ServerSpec
    from qkit.server import serve as start
    from qkit.store import RunStore, artifacts_dir
    from qkit.subjects import label_of, subject_of

    recipe = options.with_values(options.chosen_recipe(recipe_name, None), accelerator=accelerator)
    store = RunStore(artifacts_dir() / recipe.name)
    folder = Path(variant)
    if not folder.is_dir():
        folder = resolve_model(recipe.model) if variant == BASELINE else store.model_dir(variant)
    if not folder.is_dir():
        raise InputError(
            f"there is no checkpoint folder or variant {variant!r}",
            where=folder,
            fix="give a folder, or make the variant with `qkit quantize`",
        )
    subject = subject_of(BASELINE if variant == BASELINE else label_of(folder), folder)
    device = detect_accelerator(recipe.accelerator)
    spec = ServerSpec(
        python=environments.python_of("serve", device),
        model_path=folder.resolve(),
        name=subject.label,
        method=subject.method,
        accelerator=device,
        serve=recipe.serve,
        log=log or store.server_log(subject.label),
        compute_capability=describe(device).compute_capability,
        port=port,
        trust_remote_code=recipe.trust_remote_code,
    )
    console = Console(stderr=True, highlight=False)
    with (
        lock(accelerator_lock_path(), "the accelerator", wait_s=wait_s),
        console.status("starting vLLM") as status,
        start(spec, on_wait=lambda s: status.update(f"starting vLLM, {s:.0f} s")) as server,
    ):
        status.stop()
        record = server.record
        click.echo(f"{server.base_url}/v1  model: {server.model}")
        click.echo(f"kernel: {', '.join(record.kernels) or 'not named in the log'}", err=True)
        click.echo(f"KV cache: {record.kv_cache_tokens or 'unknown'} tokens", err=True)
        for mark in record.marks:
            click.echo(f"note: {mark}", err=True)
        click.echo(f"log: {spec.log}  (Ctrl-C stops the server)", err=True)
        while True:
            server.check_alive()
            time.sleep(1)
