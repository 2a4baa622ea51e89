"""Walk a plan: decide what is stale, do it, survive what fails, and go on.

Every step is checked against what is stored first, so a run that stopped half-way goes on from
there and a run with nothing changed does no work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from qkit import environments
from qkit.checkpoint import resolve_model
from qkit.errors import QkitError
from qkit.hardware import Accelerator, describe, detect_accelerator
from qkit.hashing import hash_checkpoint
from qkit.job_checks import check_suites, check_variants
from qkit.keys import Keys
from qkit.locks import accelerator_lock_path, lock
from qkit.measurements import BenchResult, FailureRecord, Hardware, Measurement, Subject
from qkit.measuring import AnswersFile, Kept, headline, lost_levels, measure_cell
from qkit.plan import Cell, Group, Plan, make_plan
from qkit.quantize.backends import BACKENDS
from qkit.recipe import BASELINE, Recipe, Variant
from qkit.reporting import Reporter, Silent
from qkit.selection import Attached
from qkit.server import RunningServer, ServerSpec, serve
from qkit.smoke import smoke_check
from qkit.store import RunStore, now, read_variant
from qkit.subjects import predict_bytes, subject_of

QUANTIZE_STEP = "quantize"
SERVE_STEP = "serve"
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

    @cached_property
    def keys(self) -> Keys:
        """Keys of the steps."""
        return Keys(self.accelerator, self.hardware, self.data)

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
        """Measure a server that someone else started.

        No suite is found done, because what it serves may change; but as long as it is the same
        process, an accuracy suite that was interrupted goes on.
        """
        self.check((), (attached.group,), own_server=False)
        with self.store.lock(self.wait_s):
            self.store.write_recipe(self.recipe, [attached.group.label])
            self.store.write_subject(attached.subject)
            smoke_check(attached.server.base_url, attached.server.model)
            for cell in attached.group.cells:
                scored = self.store.scored_file(cell.label, cell.suite)
                answers = AnswersFile(scored, attached.instance) if attached.instance else None
                self._measure_cell(attached.subject, attached.server, cell, "", answers)
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
            check_variants(
                self.recipe,
                variants,
                source=self.source,
                accelerator=self.accelerator,
                hardware=self.hardware,
                is_there=self._has_key,
                folder_of=self.model_dir,
            )
        check_suites(
            self.recipe,
            groups,
            accelerator=self.accelerator,
            data=self.data,
            own_server=own_server,
        )

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
        key = self.keys.of_variant(variant, calibration, self.source_hash)
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
        calibration = self.recipe.calibration_of(variant)
        key = self.keys.of_variant(variant, calibration, self.source_hash)
        return record is not None and record.key == key

    def _is_made(self, label: str, key: str) -> bool:
        """Tell whether a variant is there whole, made from the same inputs."""
        folder = self.model_dir(label)
        record = read_variant(folder)
        if record is None or record.key != key:
            return False
        return hash_checkpoint(folder) == record.content_hash

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
            if (
                stored
                and stored.key == self.keys.of_measurement(cell, subject, spec)
                and not self.force
            ):
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
                _smoke_check(server)
                self.store.clear_failure(label, SERVE_STEP)
                self.reporter.finished(label, SERVE_STEP, ", ".join(server.record.kernels))
                for position, cell in enumerate(cells):
                    self._measure_cell(
                        subject,
                        server,
                        cell,
                        self.keys.of_measurement(cell, subject, spec),
                        AnswersFile(
                            path=self.store.scored_file(cell.label, cell.suite),
                            key=self.keys.of_answers(subject, spec),
                        ),
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
        answers: AnswersFile | None,
    ) -> None:
        """Measure a suite and store it, or why it failed; an empty key is never found done."""
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
                    resume=bool(key or answers) and not self.force,
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


def _smoke_check(server: RunningServer) -> None:
    """Try a server that was started; one that dies of its first tokens tells why itself."""
    try:
        smoke_check(server.base_url, server.model)
    except QkitError as error:
        raise _root_cause(error, server) from None


def _root_cause(error: QkitError, server: RunningServer) -> QkitError:
    """Return the server's own reason for dying where that is why a measurement failed."""
    try:
        server.check_alive(grace_s=DYING_S)
    except QkitError as death:
        return death
    return error
