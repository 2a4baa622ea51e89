"""`qkit plan`: what fits, what runs and what is in the way, before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qkit.cli import options
from qkit.errors import EXIT_ERROR
from qkit.recipe import Recipe

if TYPE_CHECKING:
    from qkit.quantize.devices import Device
    from qkit.quantize.resources import ToMake

AUTO = "auto"
#: Cards planned for where this machine has none: those of the shipped recipes.
DEFAULT_GPUS = ("A800-80", "H100")
#: Request length where a recipe has no benchmark.
DEFAULT_LENGTH = 4096
DEFAULT_CONCURRENCY = 16


@click.command()
@click.argument("subject", metavar="RECIPE|MODEL")
@click.option("--model", help="Checkpoint folder or hub name, in place of the recipe's.")
@click.option(
    "--gpu",
    "gpus",
    metavar="CARD",
    multiple=True,
    help="Card to plan for, such as A800-80, H100 or 4090; may be given several times. Default:"
    f" `{AUTO}`, this machine's own, else {' and '.join(DEFAULT_GPUS)}.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    metavar="N",
    help="Cards a server is spread over. Default: the recipe's.",
)
@click.option(
    "--length",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Tokens of one request, prompt and answer. Default: the recipe's benchmark.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    metavar="N",
    help="Requests at once. Default: the benchmark's highest level.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every figure in bytes.")
@options.run_name
def plan(
    subject: str,
    model: str | None,
    gpus: tuple[str, ...],
    tensor_parallel: int | None,
    length: int | None,
    concurrency: int | None,
    as_json: bool,
    run_name: str | None,
) -> None:
    """Say before anything is made what fits, what runs natively, and what is in the way.

    Takes a recipe, or a checkpoint folder with the default methods. Reads config.json and
    safetensors headers only, in about a second. A folder with nothing but config.json will do.

    \b
    qkit plan demo
    qkit plan qwen2.5-7b-a800 --model ./Qwen2.5-7B-Instruct
    qkit plan ./Qwen2.5-72B-Instruct --gpu A800-80 --tensor-parallel 4 --length 8192

    Exit code: 0 every variant can be made and served as asked, 1 something is in the way, 2 the
    question cannot be answered.
    """  # noqa: D301  (\b keeps click from rewrapping)
    from qkit.hardware import has_avx512
    from qkit.quantize.forecast import Question, make_forecast

    recipe = _recipe(subject, model)
    folder = _folder(recipe.model, recipe.revision)
    bench = recipe.bench[0] if recipe.bench else None
    forecast = make_forecast(
        recipe,
        folder,
        Question(
            devices=_devices(gpus),
            tensor_parallel=tensor_parallel or recipe.serve.tensor_parallel_size,
            length=length or (bench.request_tokens.most if bench else None) or DEFAULT_LENGTH,
            concurrency=concurrency
            or max(bench.concurrency if bench else (), default=DEFAULT_CONCURRENCY),
            gpu_here=_own_device(required=False) is not None,
            avx512=has_avx512(),
        ),
        _to_make(recipe, run_name),
    )
    if as_json:
        import json
        from dataclasses import asdict

        click.echo(json.dumps({**asdict(forecast), "ok": forecast.ok}, indent=1, default=str))
    else:
        from qkit.cli.plan_view import show

        show(forecast)
    raise SystemExit(0 if forecast.ok else EXIT_ERROR)


def _recipe(subject: str, model: str | None) -> Recipe:
    """Return the recipe of that name, or the defaults for a checkpoint folder or hub name."""
    from qkit.recipe import builtin_recipes, load_recipe

    is_model = Path(subject).is_dir() or (
        subject.count("/") == 1 and not subject.endswith((".yaml", ".yml"))
    )
    if is_model and subject not in builtin_recipes():
        return options.chosen_recipe(None, model or subject)
    return options.with_values(load_recipe(subject), model=model)


def _folder(model: str, revision: str | None) -> Path:
    """Return the checkpoint's folder, or that of the hub's cache; nothing is downloaded."""
    from qkit.checkpoint import resolve_model
    from qkit.errors import InputError

    is_local = Path(model).expanduser().is_dir() or model.startswith((".", "/", "~"))
    if is_local or model.count("/") != 1:
        return resolve_model(model)  # which names what is neither a folder nor on the hub
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(config, str):
        return Path(config).parent
    raise InputError(
        f"{model!r} is not on this machine, and planning downloads nothing",
        fix=f"its config.json is enough: `hf download {model} config.json --local-dir DIR`, then"
        " give DIR as the model",
    )


def _devices(names: tuple[str, ...]) -> tuple[Device, ...]:
    from qkit.quantize.devices import find_device

    found: list[Device] = []
    for name in names or (AUTO,):
        if name.lower() == AUTO:
            own = _own_device(required=bool(names))
            found += [own] if own else [find_device(default) for default in DEFAULT_GPUS]
        else:
            found.append(find_device(name))
    return tuple(dict.fromkeys(found))


def _own_device(*, required: bool) -> Device | None:
    from qkit.errors import InputError
    from qkit.hardware import describe, detect_accelerator
    from qkit.quantize.devices import DEVICES, local_device

    own = local_device(describe(detect_accelerator()))
    if own is None and required:
        raise InputError(
            "--gpu auto: NVML finds no NVIDIA GPU here",
            fix=f"name the card: {', '.join(DEVICES)}",
        )
    return own


def _to_make(recipe: Recipe, run_name: str | None) -> list[ToMake]:
    from qkit.quantize.resources import ToMake
    from qkit.store import RunStore, artifacts_dir

    store = RunStore(artifacts_dir() / (run_name or recipe.name))
    return [
        ToMake(variant, recipe.calibration_of(variant), store.model_dir(variant.label))
        for variant in recipe.variants
    ]
