"""Walk a plan: decide what is stale, do it, survive what fails, and go on.

Every step is checked against what is stored first, so a run that stopped half-way goes on from
there and a run with nothing changed does no work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from qkit import environments
from qkit.checkpoint import resolve_model
from qkit.errors import InputError, QkitError
from qkit.hardware import Accelerator, describe, detect_accelerator
from qkit.hashing import hash_checkpoint, hash_file, hash_files
from qkit.locks import accelerator_lock_path, lock
from qkit.measurements import BenchResult, FailureRecord, Hardware, Measurement, Subject
from qkit.measuring import AnswersFile, Kept, headline, lost_levels, measure_cell
from qkit.plan import Cell, Group, Plan, answers_key, make_plan, measure_key, quantize_key
from qkit.quantize.backends import BACKENDS, check_backend
from qkit.quantize.checkpoint import inspect_checkpoint
from qkit.quantize.methods import needs_calibration
from qkit.quantize.preflight import check_source, check_variant
from qkit.quantize.resources import ToMake, check_resources
from qkit.recipe import BASELINE, Calibration, Recipe, Variant
from qkit.reporting import Reporter, Silent
from qkit.selection import Attached
from qkit.server import (
    RunningServer,
    ServerSpec,
    flags_of,
    kernel_choice,
    serve,
    variables_of,
)
from qkit.smoke import smoke_check
from qkit.store import RunStore, now, read_variant
from qkit.subjects import predict_bytes, subject_of
from qkit.suites import AccuracySuite, BenchSuite, FidelitySuite
from qkit.workloads import FromFile

QUANTIZE_STEP = "quantize"
SERVE_STEP = "serve"
#: Log-probabilities of a position that vLLM returns at most by default (`--max-logprobs`).
SERVED_LOGPROBS = 20
#: A server whose connections broke takes a moment to end.
DYING_S = 3.0
#: Begins the key of a sweep of which levels are missing or failed; the rest of it is the sweep's.
_PART_OF = "part of "


@dataclass
class Outcome:
    """What a run did: counts of steps, and the failures that are left."""

    done: int = 0
    skipped: int = 0
    failures: list[FailureRecord] = field(default_factory=list)


@dataclass
class Job:
    """One recipe on this machine.

    Args:
        recipe: What to do.
        store: Where results go.
        reporter: Who is told.
        data: Folder of local copies of hub data sets, for accuracy tasks.
        wait_s: Seconds to wait for another process that holds the accelerator or the folder.
        force: Do every step again, also those found done.
        folders: Checkpoint folders by row, where they are not the run's own: a `--out` to write
            to, or checkpoints made elsewhere to measure.
    """

    recipe: Recipe
    store: RunStore
    reporter: Reporter = field(default_factory=Silent)
    data: Path | None = None
    wait_s: float = 0.0
    force: bool = False
    folders: Mapping[str, Path] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)

    # --------------------------------------------------------------------- facts, found out once

    @cached_property
    def accelerator(self) -> Accelerator:
        """What the job runs on."""
        return detect_accelerator(self.recipe.accelerator)

    @cached_property
    def hardware(self) -> Hardware:
        """The machine."""
        return describe(self.accelerator)

    @cached_property
    def source(self) -> Path:
        """Folder of the 16-bit checkpoint."""
        return resolve_model(self.recipe.model, revision=self.recipe.revision)

    @cached_property
    def source_hash(self) -> str:
        """Content hash of the 16-bit checkpoint."""
        return hash_checkpoint(self.source)

    # ------------------------------------------------------------------------------ entry points

    def run(self) -> Outcome:
        """Quantize what the recipe names, then measure everything."""
        plan = make_plan(self.recipe)
        self.check(plan.quantize, plan.groups)
        with self._locked():
            self.store.write_recipe(self.recipe)
            self._quantize_all(plan)
            self._measure_all(plan.groups)
        return self.outcome

    def quantize(self, variants: Sequence[Variant]) -> Outcome:
        """Make variants; measure nothing."""
        self.check(variants, ())
        with self._locked():
            self.store.write_recipe(self.recipe)
            for variant in variants:
                self._quantize(variant)
        return self.outcome

    def measure(self, groups: Sequence[Group]) -> Outcome:
        """Measure variants that are there already."""
        self.check((), groups)
        with self._locked():
            planned = {BASELINE, *(variant.label for variant in self.recipe.variants)}
            self.store.write_recipe(
                self.recipe, [g.label for g in groups if g.label not in planned]
            )
            self._measure_all(groups)
        return self.outcome

    def measure_attached(self, attached: Attached) -> Outcome:
        """Measure a server that someone else started; nothing is found done, it may change."""
        self.check((), (attached.group,), own_server=False)
        with self.store.lock(self.wait_s):
            self.store.write_recipe(self.recipe, [attached.group.label])
            self.store.write_subject(attached.subject)
            smoke_check(attached.server.base_url, attached.server.model)
            for cell in attached.group.cells:
                self._measure_cell(attached.subject, attached.server, cell, "")
        return self.outcome

    def check(
        self, variants: Sequence[Variant], groups: Sequence[Group], *, own_server: bool = True
    ) -> None:
        """Find in seconds what would fail after hours; nothing is written.

        Args:
            variants: To be made.
            groups: To be measured.
            own_server: Whether qkit starts the servers.

        Raises:
            QkitError: The first thing that is wrong: checkpoint, method, environment, task, data.
        """
        if variants:
            checkpoint = inspect_checkpoint(self.source)
            check_source(checkpoint)
        for variant in variants:
            check_variant(checkpoint, variant)
            check_backend(checkpoint, variant, self.accelerator)
            source = self.recipe.calibration_of(variant).source
            if needs_calibration(variant):
                _check_local_source(source)
        if variants:
            to_make = [
                ToMake(v, self.recipe.calibration_of(v), self.model_dir(v.label))
                for v in variants
                if not self._has_key(v)
            ]
            check_resources(checkpoint, to_make, self.hardware)
        suites = {
            cell.suite: cell.settings
            for group in groups
            for cell in group.cells
            if isinstance(cell.settings, AccuracySuite)
        }
        if suites:
            from qkit.evaluate.task_catalog import check_task  # noqa: PLC0415  (imports lm-eval)

            for suite in suites.values():
                check_task(suite, data=self.data)
        texts = {cell.settings for group in groups for cell in group.cells}
        for text in texts:
            if isinstance(text, FidelitySuite):
                self._check_text(text, own_server=own_server)
        for backend in dict.fromkeys(variant.backend for variant in variants):
            environments.python_of(BACKENDS[backend].environment, self.accelerator)
        if groups and own_server:
            environments.python_of("serve", self.accelerator)
        self._check_calibrations(variants)

    def _check_calibrations(self, variants: Sequence[Variant]) -> None:
        """Check the calibration data of the variants that are to be made, each source once."""
        stale = [v for v in variants if needs_calibration(v) and not self._has_key(v)]
        if stale:
            from qkit.quantize.calibration import check_calibration  # noqa: PLC0415  (tokenizers)

            for calibration in {self.recipe.calibration_of(v) for v in stale}:
                check_calibration(calibration, self.source)

    def _check_text(self, suite: FidelitySuite, *, own_server: bool) -> None:
        """Refuse a text that cannot be read, or more log-probabilities than will be served."""
        _ = self._text_hash(suite)
        raised = any(argument.startswith("--max-logprobs") for argument in self.recipe.serve.args)
        if own_server and suite.top_logprobs > SERVED_LOGPROBS and not raised:
            raise InputError(
                f"`fidelity.top_logprobs` is {suite.top_logprobs}, but vLLM returns "
                f"{SERVED_LOGPROBS} unless told otherwise",
                fix=f'add "--max-logprobs", "{suite.top_logprobs}" to `serve.args`',
            )

    def _text_hash(self, suite: FidelitySuite) -> str:
        from qkit.evaluate.fidelity_text import (  # noqa: PLC0415  (reads the whole text)
            hash_documents,
            read_documents,
        )

        return hash_documents(read_documents(suite.text))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (
            self.store.lock(self.wait_s),
            lock(accelerator_lock_path(), "the accelerator", wait_s=self.wait_s),
        ):
            yield

    # ---------------------------------------------------------------------------------- quantize

    def _quantize_all(self, plan: Plan) -> None:
        for variant in plan.quantize:
            self._quantize(variant)

    def _quantize(self, variant: Variant) -> None:
        label = variant.label
        calibration = self.recipe.calibration_of(variant)
        key = self._quantize_key(variant, calibration)
        from qkit.quantize.job import quantize_variant, remove_stale  # noqa: PLC0415  (numpy)

        # Also where nothing is to be made: a killed run may have left gigabytes beside it.
        remove_stale(self.model_dir(label))
        if not self.force and self._is_made(label, key):
            self.outcome.skipped += 1
            self.reporter.skipped(label, QUANTIZE_STEP)
            return
        self.reporter.started(label, QUANTIZE_STEP)
        try:
            record = quantize_variant(
                variant=variant,
                calibration=calibration,
                source=self.source,
                source_hash=self.source_hash,
                out=self.model_dir(label),
                work=self.store.quantize_dir(label),
                python=environments.python_of(
                    BACKENDS[variant.backend].environment, self.accelerator
                ),
                accelerator=self.accelerator,
                key=key,
                trust_remote_code=self.recipe.trust_remote_code,
                on_progress=lambda p: self.reporter.progress(p.stage, p.done, p.total),
            )
        except QkitError as error:
            self._failed(label, QUANTIZE_STEP, error)
            return
        self.store.clear_failure(label, QUANTIZE_STEP)
        self.outcome.done += 1
        self.reporter.finished(label, QUANTIZE_STEP, record.scheme)

    def _has_key(self, variant: Variant) -> bool:
        """Tell whether a variant of the same inputs is there, without reading its weights."""
        record = read_variant(self.model_dir(variant.label))
        key = self._quantize_key(variant, self.recipe.calibration_of(variant))
        return record is not None and record.key == key

    def _is_made(self, label: str, key: str) -> bool:
        """Tell whether a variant is there whole, made from the same inputs."""
        folder = self.model_dir(label)
        record = read_variant(folder)
        if record is None or record.key != key:
            return False
        return hash_checkpoint(folder) == record.content_hash

    def _quantize_key(self, variant: Variant, calibration: Calibration) -> str:
        source = Path(calibration.source)
        calibrated = needs_calibration(variant)
        return quantize_key(
            source_hash=self.source_hash,
            variant=variant,
            calibration=calibration if calibrated else Calibration(),
            calibration_hash=_hash_local(source) if calibrated and source.exists() else None,
            environment=environments.find(
                BACKENDS[variant.backend].environment, self.accelerator
            ).fingerprint,
            accelerator=self.accelerator,
        )

    # ----------------------------------------------------------------------------------- measure

    def _measure_all(self, groups: Sequence[Group]) -> None:
        not_made = {f.variant for f in self.outcome.failures if f.step == QUANTIZE_STEP}
        for group in groups:
            if group.label in not_made:
                continue  # an older variant that may lie there is not what was asked for
            try:
                subject = subject_of(group.label, self.model_dir(group.label))
                subject = subject.model_copy(
                    update={"predicted_bytes": self._predicted_bytes(group.label)}
                )
            except QkitError as error:
                self._failed(group.label, SERVE_STEP, error)
                continue
            self.store.write_subject(subject)
            self._measure(subject, group)

    def _predicted_bytes(self, label: str) -> int | None:
        """Return what `qkit plan` predicts for a row's weights; None for folders made elsewhere."""
        variants = {variant.label: variant for variant in self.recipe.variants}
        if label in self.folders or (label != BASELINE and label not in variants):
            return None
        return predict_bytes(self.source, variants.get(label))

    def model_dir(self, label: str) -> Path:
        """Return the checkpoint folder of a row: the source for the baseline."""
        if label in self.folders:
            return self.folders[label]
        return self.source if label == BASELINE else self.store.model_dir(label)

    def _measure(self, subject: Subject, group: Group) -> None:
        spec = self.server_spec(subject)
        stale = []
        for cell in group.cells:
            stored = self.store.measurement(cell.label, cell.suite)
            if stored and stored.key == self._measure_key(cell, subject, spec) and not self.force:
                self.outcome.skipped += 1
                self.reporter.skipped(cell.label, cell.suite)
            else:
                stale.append(cell)
        # A server that dies ends its cell; the others get a new one.
        while stale:
            stale = self._measure_on_one_server(subject, spec, stale)

    def _measure_on_one_server(
        self, subject: Subject, spec: ServerSpec, cells: list[Cell]
    ) -> list[Cell]:
        """Measure cells until the server dies; return those that are left."""
        label = subject.label
        self.reporter.started(label, SERVE_STEP)
        limit = round(spec.serve.startup_timeout_s)
        try:
            with serve(
                spec, on_wait=lambda s: self.reporter.progress("starting vLLM", round(s), limit)
            ) as server:
                smoke_check(server.base_url, server.model)
                self.store.clear_failure(label, SERVE_STEP)
                self.reporter.finished(label, SERVE_STEP, ", ".join(server.record.kernels))
                for position, cell in enumerate(cells):
                    self._measure_cell(
                        subject,
                        server,
                        cell,
                        self._measure_key(cell, subject, spec),
                        self._answers_file(cell, subject, spec),
                    )
                    if not server.is_alive():
                        return cells[position + 1 :]
        except QkitError as error:
            self._failed(label, SERVE_STEP, error)
        return []

    def _measure_cell(
        self,
        subject: Subject,
        server: RunningServer,
        cell: Cell,
        key: str,
        answers: AnswersFile | None = None,
    ) -> None:
        self.reporter.started(cell.label, cell.suite)
        if self.force:
            self.store.drop_scored(cell.label, cell.suite)
        try:
            measurement = measure_cell(
                cell,
                subject,
                server,
                key=key,
                hardware=self.hardware,
                data=self.data,
                reporter=self.reporter,
                kept=Kept(
                    levels=None if self.force else self._left_over(cell, key),
                    on_level=lambda part: self.store.write_measurement(_unfinished(part)),
                    answers=answers,
                    scores_file=self.store.scores_file(cell.label, cell.suite),
                    resume=not self.force,
                ),
            )
        except QkitError as error:
            self._failed(cell.label, cell.suite, _root_cause(error, server))
            return
        if lost := lost_levels(measurement):
            # What was measured is kept and shown, but not taken for done.
            self.store.write_measurement(_unfinished(measurement))
            cause = _root_cause(lost, server)
            self._failed(cell.label, cell.suite, cause, measurement.created)
            return
        self.store.write_measurement(measurement)
        self.store.drop_scored(cell.label, cell.suite)
        self.outcome.done += 1
        self.reporter.finished(cell.label, cell.suite, headline(measurement))

    def _left_over(self, cell: Cell, key: str) -> BenchResult | None:
        """Return the levels that an interrupted sweep with the same inputs has measured."""
        stored = self.store.measurement(cell.label, cell.suite)
        return stored.bench if key and stored and stored.key == _PART_OF + key else None

    def server_spec(self, subject: Subject) -> ServerSpec:
        """Return how a row is served."""
        return ServerSpec(
            python=environments.python_of("serve", self.accelerator),
            model_path=subject.path,
            name=subject.label,
            method=subject.method,
            accelerator=self.accelerator,
            serve=self.recipe.serve,
            log=self.store.server_log(subject.label),
            compute_capability=self.hardware.compute_capability,
            trust_remote_code=self.recipe.trust_remote_code,
        )

    def _measure_key(self, cell: Cell, subject: Subject, spec: ServerSpec) -> str:
        choice = kernel_choice(spec)
        return measure_key(
            cell=cell,
            variant_hash=subject.content_hash,
            flags=(*flags_of(spec), *choice.flags),
            variables={**variables_of(spec), **dict(choice.variables)},
            environment=environments.find("serve", self.accelerator).fingerprint,
            hardware=self.hardware,
            harness=metadata.version("lm-eval") + _task_files(cell),
            data=str(self.data) if self.data else None,
            text=(
                self._text_hash(cell.settings) if isinstance(cell.settings, FidelitySuite) else None
            ),
            prompt_file=_hash_of_prompts(cell),
        )

    def _answers_file(self, cell: Cell, subject: Subject, spec: ServerSpec) -> AnswersFile:
        choice = kernel_choice(spec)
        return AnswersFile(
            path=self.store.scored_file(cell.label, cell.suite),
            key=answers_key(
                variant_hash=subject.content_hash,
                flags=(*flags_of(spec), *choice.flags),
                variables={**variables_of(spec), **dict(choice.variables)},
                environment=environments.find("serve", self.accelerator).fingerprint,
                hardware=self.hardware,
            ),
        )

    def _failed(self, label: str, step: str, error: QkitError, created: str | None = None) -> None:
        record = FailureRecord(
            variant=label,
            step=step,
            reason=error.what,
            detail=str(error),
            created=created or now(),
        )
        self.store.write_failure(record)
        self.outcome.failures.append(record)
        self.reporter.failed(label, step, str(error))


def _unfinished(measurement: Measurement) -> Measurement:
    """Return a measurement that is kept and shown, but not taken for done."""
    return measurement.model_copy(update={"key": _PART_OF + measurement.key})


def _hash_of_prompts(cell: Cell) -> str | None:
    """Return the hash of the file a benchmark takes its prompts from; None without one."""
    workload = cell.settings.workload if isinstance(cell.settings, BenchSuite) else None
    if not isinstance(workload, FromFile):
        return None
    path = Path(workload.path).expanduser()
    return hash_file(path) if path.is_file() else None


def _root_cause(error: QkitError, server: RunningServer) -> QkitError:
    """Return the server's own reason for dying where that is why a measurement failed."""
    try:
        server.check_alive(grace_s=DYING_S)
    except QkitError as death:
        return death
    return error


def _task_files(cell: Cell) -> str:
    """Return the hash of a suite's own task files, empty where it has none."""
    folder = cell.settings.task_dir if isinstance(cell.settings, AccuracySuite) else None
    return "" if folder is None else f" {_hash_local(Path(folder))}"


def _check_local_source(source: str) -> None:
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or path.suffix in {
        ".jsonl", ".json", ".parquet", ".csv", ".txt",
    }  # fmt: skip
    if looks_local and not path.exists():
        raise InputError(
            f"there is no calibration file {source!r}", fix="check `calibration.source`"
        )


def _hash_local(source: Path) -> str:
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    return hash_files(source if source.is_dir() else source.parent, files)
