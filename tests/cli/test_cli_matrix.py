"""`qkit matrix`: a price adds the capacity table, from the command line or the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes.checkpoints import TinyQwen2
from golden import matrix_input as given

from qkit.cli import cli
from qkit.recipe import Recipe
from qkit.store import RunStore, artifacts_dir
from qkit.subjects import subject_of


def stored_run(folder: Path, **recipe: object) -> None:
    """Store a run of a baseline with one benchmark."""
    model = TinyQwen2(hidden=128).write(folder / "model")
    store = RunStore(artifacts_dir() / "a-run")
    store.write_recipe(
        Recipe.model_validate({"name": "a-run", "model": str(model), "variants": (), **recipe})
    )
    subject = subject_of("bf16", model)
    store.write_subject(subject)
    store.write_measurement(
        given.measurement(
            "bf16",
            "bench",
            bench=given.sweep(given.BF16_FIGURES),
            variant_hash=subject.content_hash,
        )
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def printed(*options: str) -> str:
    result = CliRunner().invoke(cli, ["matrix", "a-run", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_without_a_price_there_is_no_capacity_table(tmp_path):
    stored_run(tmp_path)
    assert "Capacity" not in printed()


def test_a_price_on_the_command_line(tmp_path):
    stored_run(tmp_path)
    text = printed("--price", "15", "--currency", "CNY", "--tokens-per-request", "200")
    assert "15 CNY an hour, 10,800 CNY a month" in text
    assert "4.84" in text, "967.4 tok/s / 200 tokens"


def test_a_price_in_the_recipe(tmp_path):
    stored_run(tmp_path, price_per_hour=2.5, currency="USD", tokens_per_request=128)
    assert "2.5 USD an hour" in printed()
    assert "3 USD an hour" in printed("--price", "3")
    assert '"cost_per_million_tokens"' in printed("--format", "json")


def test_a_price_of_nothing_is_refused(tmp_path):
    stored_run(tmp_path)
    assert CliRunner().invoke(cli, ["matrix", "a-run", "--price", "0"]).exit_code == 2
