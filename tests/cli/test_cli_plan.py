"""`qkit plan` as a person uses it: text at 100 columns, JSON, exit codes, and no heavy imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from fakes.checkpoints import TinyQwen2
from fakes.qwen_configs import config_folder

from qkit.cli import cli
from qkit.quantize.devices import DEVICES


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Work in an empty folder, without a GPU and without the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qkit.hardware._gpu", lambda: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("QKIT_ARTIFACTS", raising=False)


def qkit(*arguments):
    """Run the command line and return (exit code, everything it printed)."""
    result = CliRunner().invoke(cli, ["plan", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_model_gets_checks_sizes_cards_and_splits(tmp_path):
    code, output = qkit(config_folder(tmp_path, "7B"), "--gpu", "A800-80", "--length", 4096)
    assert code == 0
    lines = output.splitlines()
    assert max(map(len, lines)) <= 100
    for text in (
        "7.62 B parameters in BF16, 15.23 GB; 28 layers, 28 heads, 4 KV heads",
        "KV 57,344 bytes a token",
        "no weights in this folder: all shapes come from config.json",
        "Serving on 1 x A800-80 (80.0 GB, 2.04 TB/s, compute capability 8.0)",
        "weight-only: no FP8 units",
        "28 attention heads are not divisible by 8",
        "use one of --tensor-parallel 1, 2, 4",
    ):
        assert text in output
    [awq] = [line.split() for line in lines if line.startswith("awq") and "GB" in line][:1]
    assert awq[-7:] == ["3.39", "GB", "2.18", "GB", "5.57", "GB", "0.366"]


def test_the_72b_model_on_eight_cards_is_a_problem(tmp_path):
    code, output = qkit(config_folder(tmp_path, "72B"), "--gpu", "A800-80", "--tensor-parallel", 8)
    assert code == 1
    assert "not over so many cards" in output
    assert "pad the MLP from 29,568 to 29,696 with zeros" in output
    assert max(map(len, output.splitlines())) <= 100


def test_the_floor_is_told_for_every_card(tmp_path):
    _, output = qkit(config_folder(tmp_path, "32B"), "--gpu", "H100", "--length", 1024)
    title, _, rest = output.partition("TPOT floor in ms on 1 card of each kind")[2].partition("\n")
    assert title.startswith(", one request of 1,024 tokens")
    header, *rows = [line.split() for line in rest.partition("\n\n")[0].splitlines()]
    assert header[1:] == list(DEVICES)
    floors = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    # 65.5 GB do not fit into 48 GB, and do into 141 GB at 4.8 TB/s.
    assert floors["bf16"]["L40S"] == "—"
    read = 65_527_752_704 - 152_064 * 5_120 * 2 + 1024 * 262_144
    assert float(floors["bf16"]["H200"]) == pytest.approx(1e3 * read / 4800e9, rel=0.005)
    assert floors["awq"]["A800-40"] != "—"


def test_a_recipe_with_its_model_elsewhere(tmp_path):
    folder = config_folder(tmp_path, "7B")
    code, output = qkit("qwen2.5-7b-a800", "--model", folder)
    assert code == 0
    assert f"qwen2.5-7b-a800  {folder}" in output
    # No GPU here: the shipped recipes' cards.
    assert "Serving on 1 x A800-80" in output
    assert "Serving on 1 x H100" in output


def test_the_demo_is_whole_and_fits():
    code, output = qkit("demo", "--gpu", "H200")
    assert code == 0
    assert "2.76 M parameters in BF16, 5.51 MB" in output
    assert "problem" not in output


def test_a_variant_that_cannot_be_made_ends_in_an_exit_code(tmp_path):
    folder = TinyQwen2(hidden=128, intermediate=192).write(tmp_path / "model")
    code, output = qkit(folder, "--gpu", "H100")
    assert code == 1
    assert "group size 128 does not divide the 192 inputs" in output
    assert "cannot be made" in output


def test_what_is_in_the_way_comes_first_and_once_for_all_it_concerns(tmp_path):
    code, output = qkit(config_folder(tmp_path, "72B"), "--gpu", "A800-80", "--tensor-parallel", 2)
    checks = output.partition("Checks\n")[2].partition("\n\n")[0].splitlines()
    statuses = [line.split()[0] for line in checks if not line.startswith(" ")]
    assert code == 1
    assert statuses == sorted(statuses, key=["problem", "note", "ok"].index)
    [problem] = [line for line in checks if line.startswith("problem")]
    assert problem.split()[1:3] == ["awq,", "gptq"]


def test_json_holds_every_figure_in_bytes(tmp_path):
    code, output = qkit(config_folder(tmp_path, "7B"), "--gpu", "4090", "--json")
    value = json.loads(output)
    assert code == 0
    assert value["ok"] is True
    assert value["kv_bytes_per_token"] == 57_344
    rows = {row["label"]: row for row in value["variants"]}
    assert rows["bf16"]["weight_bytes"] == 15_231_233_024
    [card] = rows["awq"]["cards"]
    assert (card["card"], card["verdict"]["support"]) == ("RTX4090", "weight-only")
    assert card["serving"]["kv_tokens"] > 0
    assert [verdict["size"] for verdict in rows["awq"]["tensor_parallel"]] == [1, 2, 4, 8]
    assert value["question"]["length"] == 640


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "there is no recipe 'dmeo', did you mean 'demo'?"),
        (["./nowhere/at/all"], "there is no recipe './nowhere/at/all'"),
        (["demo", "--gpu", "H10O"], "no card 'H10O' in the table, did you mean 'H100'?"),
        (["demo", "--gpu", "auto"], "--gpu auto: NVML finds no NVIDIA GPU here"),
        (["demo", "--model", "./nowhere"], "there is no checkpoint folder './nowhere'"),
        (
            ["Qwen/Qwen2.5-7B-Instruct"],
            "'Qwen/Qwen2.5-7B-Instruct' is not on this machine, and planning downloads nothing",
        ),
    ],
)
def test_a_question_that_cannot_be_answered(arguments, message):
    code, output = qkit(*arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_a_model_of_the_hubs_cache_is_found(tmp_path):
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--Qwen--Qwen2.5-7B-Instruct"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    config_folder(tmp_path, "7B").rename(repo / "snapshots" / commit)
    program = "import sys; from qkit.cli import main; sys.argv = ['qkit', *sys.argv[1:]]; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "H100"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "7.62 B parameters" in done.stdout


def test_nothing_heavy_is_imported():
    # (tokenizers, which tells the scripts of a vocabulary, is imported in a twentieth of a second.)
    heavy = ("torch", "transformers", "datasets", "lm_eval", "scipy", "numpy", "pyarrow")
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from qkit.cli import cli\n"
        "result = CliRunner().invoke(cli, ['plan', 'demo'])\n"
        "assert result.exit_code == 0, result.output\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_help_names_the_command():
    output = CliRunner().invoke(cli, ["--help"]).output
    assert "Say in a second what fits" in output
