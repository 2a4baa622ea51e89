"""Environments: their states, how they are made (by a uv that only pretends), and the pins."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from qkit import environments
from qkit.cli import cli
from qkit.environments import (
    BACKENDS,
    DEFAULT_BACKENDS,
    MAIN_MODULES,
    REQUIREMENTS,
    SOURCE_BUILDS,
    STAMP,
    check,
    create,
    find,
    made_or_default,
    python_of,
    runs_on,
    variables_of,
)
from qkit.errors import EnvironmentMissingError, InputError

#: Notes its arguments; "venv" makes a folder whose interpreter is this one; fails where told to.
FAKE_UV = """#!{python}
import json, os, sys
from pathlib import Path

with open({log!r}, "a") as stream:
    stream.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == os.environ.get("FAKE_UV_FAILS_AT"):
    sys.exit("error: no solution found")
if sys.argv[1] == "venv":
    program = Path(sys.argv[-1]) / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\\nexec {python} \\"$@\\"\\n")
    program.chmod(0o755)
"""


class FakeUv:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "uv.log"
        self.program = folder / "uv"
        self.program.write_text(FAKE_UV.format(python=sys.executable, log=str(self.log)))
        self.program.chmod(0o755)

    def calls(self) -> list[list[str]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pins of our own, in which every backend's main module is the json module."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    for name in ("quantize-cpu", "serve-cpu", "autoawq-cpu"):
        (folder / f"{name}.txt").write_text("setuptools==84.2.1\ntorch==2.13.0+cpu\n")
    monkeypatch.setattr(environments, "REQUIREMENTS", folder)
    monkeypatch.setattr(environments, "MAIN_MODULES", dict.fromkeys(BACKENDS, "json"))
    monkeypatch.setenv("QKIT_CACHE", str(tmp_path / "cache"))
    for name in BACKENDS:
        monkeypatch.delenv(f"QKIT_{name.upper()}_PYTHON", raising=False)
    for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def uv(tmp_path: Path, pins: Path, monkeypatch: pytest.MonkeyPatch) -> FakeUv:
    fake = FakeUv(tmp_path)
    monkeypatch.setattr("uv.find_uv_bin", lambda: str(fake.program))
    return fake


def state() -> str:
    return find("quantize", "cpu").state


# ------------------------------------------------------------------------------------ the states


def test_an_unknown_backend_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="no backend 'autoawk', did you mean 'autoawq'"):
        find("autoawk", "cpu")


def test_a_backend_without_pins_for_an_accelerator_is_refused(uv: FakeUv) -> None:
    with pytest.raises(InputError) as caught:
        create("autogptq", "cpu")
    assert uv.calls() == []
    with pytest.raises(InputError, match="'serve' does not run on cuda, only on cpu"):
        python_of("serve", "cuda")
    assert "does not run on cpu" in caught.value.what


def test_missing_then_ready_and_made_once(uv: FakeUv) -> None:
    assert state() == "missing"
    with pytest.raises(EnvironmentMissingError) as caught:
        python_of("quantize", "cpu")
    assert caught.value.fix == "run `qkit env create quantize --accelerator cpu`"
    made = create("quantize", "cpu")
    assert made.state == state() == "ready"
    assert python_of("quantize", "cpu") == made.python
    assert [call[0] for call in uv.calls()] == ["venv", "pip"]
    create("quantize", "cpu")
    assert len(uv.calls()) == 2
    create("quantize", "cpu", force=True)
    assert [call[0] for call in uv.calls()] == ["venv", "pip", "venv", "pip"]


def test_other_pins_are_another_environment(uv: FakeUv, pins: Path) -> None:
    first = create("quantize", "cpu")
    (pins / "quantize-cpu.txt").write_text("torch==2.14.0+cpu\n")
    second = find("quantize", "cpu")
    assert second.state == "missing"
    assert second.python != first.python
    assert second.fingerprint != first.fingerprint


@pytest.mark.parametrize("fails_at", ["venv", "pip"])
def test_an_interrupted_creation_is_not_taken_for_a_finished_one(
    uv: FakeUv, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    monkeypatch.setenv("FAKE_UV_FAILS_AT", fails_at)
    with pytest.raises(EnvironmentMissingError, match=f"`uv {fails_at}` failed") as caught:
        create("quantize", "cpu")
    assert "no solution found" in str(caught.value)
    assert state() == {"venv": "missing", "pip": "incomplete"}[fails_at]
    with pytest.raises(EnvironmentMissingError):
        python_of("quantize", "cpu")
    monkeypatch.delenv("FAKE_UV_FAILS_AT")
    left = find("quantize", "cpu").python.parent / "left-over"
    if fails_at == "pip":
        left.touch()
    assert create("quantize", "cpu").state == "ready"
    assert not left.exists()


def test_one_whose_main_module_does_not_import_is_not_finished(
    uv: FakeUv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environments.MAIN_MODULES, "quantize", "a_module_there_is_not")
    with pytest.raises(EnvironmentMissingError, match="`import a_module_there_is_not` fails"):
        create("quantize", "cpu")
    assert state() == "incomplete"


def test_one_killed_before_its_stamp_is_not_finished(uv: FakeUv) -> None:
    folder = create("quantize", "cpu").python.parent.parent
    (folder / STAMP).unlink()
    assert state() == "incomplete"


def test_an_interpreter_of_ones_own(
    tmp_path: Path, uv: FakeUv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKIT_QUANTIZE_PYTHON", sys.executable)
    found = find("quantize", "cpu")
    assert (found.state, found.python) == ("own", Path(sys.executable))
    assert re.fullmatch(r"[0-9a-f]{64}", found.fingerprint)
    assert create("quantize", "cpu") == found
    # Its versions are the person's affair; that the main module imports is ours.
    assert check("quantize", "cpu")["pytest"] == pytest.__version__
    assert uv.calls() == []
    monkeypatch.setenv("QKIT_QUANTIZE_PYTHON", str(tmp_path / "nowhere"))
    assert state() == "missing"


# ------------------------------------------------------------------------------- making, checking


@pytest.mark.parametrize(
    ("given", "variables", "torch_there", "options"),
    [
        (None, {}, False, ["--torch-backend", "cpu"]),
        ("links", {}, False, ["--find-links", "links", "--torch-backend", "cpu"]),
        ("links", {}, True, ["--find-links", "links"]),
        (None, {"PIP_FIND_LINKS": "links"}, True, ["--find-links", "links"]),
        (
            None,
            {"UV_FIND_LINKS": "links", "PIP_FIND_LINKS": "other"},
            True,
            ["--find-links", "links"],
        ),
    ],
)
def test_where_torch_comes_from(
    tmp_path: Path,
    uv: FakeUv,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    variables: dict[str, str],
    torch_there: bool,
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("links").mkdir()
    if torch_there:
        (Path("links") / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = create("serve", "cpu", find_links=given)
    (_, install) = uv.calls()
    assert install == [
        *("pip", "sync", "--quiet", "--python", str(made.python)),
        *options,
        str(made.lock_file),
    ]


def test_a_package_built_from_source_comes_after_what_it_imports(uv: FakeUv) -> None:
    made = create("autoawq", "cpu", find_links="links")
    (_, first, then) = uv.calls()
    assert first[:2] == ["pip", "install"]
    assert first[-2:] == ["setuptools==84.2.1", "torch==2.13.0+cpu"]
    assert then[-5:] == [
        *("--no-deps", "--no-build-isolation-package", "autoawq"),
        *("--requirements", str(made.lock_file)),
    ]
    assert made.state == "ready"


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("pytest==0.0.1", "pytest is .* in the quantize environment, pinned is 0.0.1"),
        ("No-Such_Package==1.0", "no-such-package is missing in the quantize environment"),
    ],
)
def test_a_wrong_or_missing_version_is_found(
    uv: FakeUv, pins: Path, pin: str, message: str
) -> None:
    (pins / "quantize-cpu.txt").write_text(f"{pin}\n")
    create("quantize", "cpu")
    with pytest.raises(EnvironmentMissingError, match=message) as caught:
        check("quantize", "cpu")
    assert caught.value.fix == "run `qkit env create quantize --accelerator cpu --force`"


def test_right_versions_pass_whatever_the_build(uv: FakeUv, pins: Path) -> None:
    (pins / "quantize-cpu.txt").write_text(
        "# a comment\n"
        f"pytest[all]=={pytest.__version__}+cpu ; python_version >= '3'\n"
        "    # via something\n"
    )
    create("quantize", "cpu")
    assert check("quantize", "cpu")["pytest"] == pytest.__version__


def test_gptqmodel_gets_along_with_few_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert variables_of("gptqmodel") == {"GPTQMODEL_CPU_WORKERS": "2"}
    assert variables_of("autoawq") == {}
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert variables_of("gptqmodel") == {}


# ------------------------------------------------------------------------------- the command line


def test_create_without_a_name_makes_what_most_people_need(uv: FakeUv) -> None:
    done = CliRunner().invoke(cli, ["env", "create", "--accelerator", "cpu"])
    assert done.exit_code == 0, done.output
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        ["quantize", "cpu", "ready"],
        ["serve", "cpu", "ready"],
    ]
    assert made_or_default("cpu") == ["quantize", "serve"]
    create("autoawq", "cpu")
    assert made_or_default("cpu") == ["quantize", "serve", "autoawq"]


def test_list_tells_what_is_archived_and_what_does_not_run_here(pins: Path) -> None:
    done = CliRunner().invoke(cli, ["env", "list", "--accelerator", "cpu"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.output.splitlines() if line[0] != " "}
    assert list(rows) == list(BACKENDS)
    assert rows["autoawq"].split()[2] == "missing"
    assert "archived upstream, succeeded by llm-compressor" in rows["autoawq"]
    assert rows["autogptq"].split()[2] == "-"
    assert "archived upstream, succeeded by GPTQModel" in rows["autogptq"]


# --------------------------------------------------------------------------- the pins that we ship

INPUTS = sorted(REQUIREMENTS.glob("*.in"))


def test_every_backend_has_pins_and_a_module() -> None:
    assert set(MAIN_MODULES) == set(BACKENDS)
    assert set(DEFAULT_BACKENDS) <= set(BACKENDS)
    assert {path.stem.rpartition("-")[0] for path in INPUTS} == set(BACKENDS)
    assert {path.stem for path in INPUTS} == {path.stem for path in REQUIREMENTS.glob("*.txt")}
    assert [name for name in BACKENDS if not runs_on(name, "cpu")] == ["autogptq"]
    assert all(runs_on(name, "cuda") for name in BACKENDS)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.stem)
def test_every_line_of_a_lock_is_a_pin_and_what_was_asked_for_is_there(path: Path) -> None:
    lines = path.with_suffix(".txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    pins = environments._pins(path.with_suffix(".txt"))
    assert len(pins) == len(lines)
    for line in path.read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            assert pins[name].partition("+")[0] == version
    backend = path.stem.rpartition("-")[0]
    if build := SOURCE_BUILDS.get(backend):
        assert {build.package, *build.needs} <= pins.keys()
