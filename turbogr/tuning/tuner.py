"""`turbogr tune`: search for better settings of a recipe on one log within a given time, and train the best.

Every trial is a run folder, trained by a process of its own up to a rung and resumed from there if it is promoted
(`halving.py`). Validation items alone decide; the test items are measured once, for the run that is kept. The state is
in the trials' folders and in tune.json, so a search that was interrupted or killed goes on.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, Signals
from typing import NamedTuple

from turbogr.checkpoints import Checkpoints
from turbogr.config import Config, Overrides, dump_config, find_recipe, load_config, load_run_config, override_texts
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.evaluator import Interrupted
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.files import replace_text
from turbogr.machine import usable_cores
from turbogr.plugins import load_plugins
from turbogr.runs import MetricLog
from turbogr.sweep.run_process import RunProcess, ending
from turbogr.tasks import make_task
from turbogr.tasks.task import DataFacts
from turbogr.training.run import resolve_against
from turbogr.training.run_summary import read_summary
from turbogr.training.stopping import StopRequest
from turbogr.tuning.halving import Trial, best_trial, next_promotion, rung_epochs
from turbogr.tuning.search_space import MOST_TRIALS, settings_to_try
from turbogr.tuning.tuning_record import TuningRecord

TRAIN = [sys.executable, "-m", "turbogr", "train"]
TRIALS, BEST, RECIPE, LOGS = "trials", "best", "recipe.yaml", "logs"
MOST_JOBS = 4

_POLL_SECONDS = 0.1
_LEAST_FINISH = 10.0  # seconds kept for the last evaluation and the summary
_MOST_RESERVED = 0.6  # share of the time that is kept for training the best to its end
_MOST_SIMPLE = 0.25  # share of the time after which simple methods are given up
_OF_TRIALS = {
    "evaluate.part": "valid",
    "evaluate.baselines": "[]",
    "deliver.choose": "model",
    "train.copy_data": "never",
    "train.tensorboard": "false",
    "train.profile": "false",
    "train.keep_checkpoints": "1",
}
"""What trials do without: it is for the run that is kept."""


@dataclass(frozen=True)
class TuneResult:
    """How a search ended: its folder, the best settings, their validation value, and the run; None where it has none.

    `signal` is what interrupted it; the same call goes on.
    """

    out: Path
    settings: dict[str, str]
    metric: str
    value: float | None
    standard_error: float | None
    recipe: Path | None
    run: Path | None
    delivered: str | None
    table: str
    notes: list[str]
    signal: Signals | None = None


def tune(
    data: str | Path | Store,
    *,
    minutes: float = 10.0,
    out: str | Path | None = None,
    recipe: str | Path = "quickstart",
    jobs: int | None = None,
    overrides: Overrides = (),
    plugins: Sequence[str | Path] = (),
    report: Callable[[str], None] | None = None,
) -> TuneResult:
    """Search for settings of `recipe` that are better on the validation items of a store, and train the best.

    `out` gets recipe.yaml, tune.json, the run best and the trials; unset, it is the store's name with -tune. A search
    that is there already goes on; `minutes` are those of all its parts together. `jobs` trials run at a time (unset:
    one a core, at most 4). Settings in `overrides` stay as they are. `report` gets a line for every event.

    Raises:
        UserError: a bad recipe, store or folder, a split without validation items, or no trial that could be trained.
    """
    store = data if isinstance(data, Store) else Store.open(data)
    folder = Path(f"{store.path.resolve().name}-tune" if out is None else out)
    search = _Search(store, folder, minutes, find_recipe(recipe), jobs, override_texts(overrides), plugins, report)
    return search.run()


class _Active(NamedTuple):
    """A trial on its way to a rung."""

    trial: Trial
    rung: int
    process: RunProcess


class _Search:
    """One search, from its folder to its result."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        minutes: float,
        recipe: Path,
        jobs: int | None,
        overrides: Sequence[str],
        plugins: Sequence[str | Path],
        report: Callable[[str], None] | None,
    ) -> None:
        if not minutes > 0:
            raise UserError(f"--minutes is {minutes:g}; give more than 0")
        if jobs is not None and jobs < 1:
            raise UserError(f"--jobs is {jobs}; give at least 1")
        self.store, self.folder, self.recipe = store, folder, recipe
        self.overrides, self.plugins = list(overrides), load_plugins(plugins)
        self.jobs, self.report = jobs or min(MOST_JOBS, usable_cores()), report or (lambda line: None)
        self.given = load_config(recipe, overrides, plugins=self.plugins)
        self._check()
        self.base = resolve_against(load_config(recipe, self._settings(()), plugins=self.plugins), store)
        self.split = Split.of(store, self.base.data.split)
        self.task = make_task(self.base, DataFacts(store.num_items))
        assert self.base.evaluate.metric is not None, "the config is resolved"
        self.metric: MetricInfo = self.task.describe_metrics([self.base.evaluate.metric])[0]
        self.record = self._open_record()
        self.budget = 60.0 * minutes
        self._spent, self._started = self.record.seconds, time.monotonic()
        self.stop = StopRequest()
        self._running: dict[str, _Active] = {}
        self._exhausted = False

    def run(self) -> TuneResult:
        """Search until the time is up or nothing is left to try, then train the best."""
        with self.stop:
            if self.record.simple is None:
                self._measure_simple()
            self._search()
            best = best_trial(self.record.trials, higher_is_better=self.metric.higher_is_better)
            if best is None and not self.stop:
                raise self._nothing_trained()
            if best is not None:
                self._write_recipe(best)
            if best is not None and not self.stop:
                self._train_best(best)
        self._save()
        return self._result(best)

    def elapsed(self) -> float:
        """Seconds spent so far, also before an interruption."""
        return self._spent + time.monotonic() - self._started

    def _check(self) -> None:
        if self.given.method is not None:
            raise UserError(
                f"model.name is '{self.given.method}', whose settings `turbogr train` chooses itself; tune a recipe of "
                "a network, such as quickstart"
            )
        split = Split.of(self.store, self.given.data.split)
        if not (split.valid >= 0).any():
            raise UserError(
                f"the split '{split.rule}' of {self.store.path} has no validation items to choose settings by; set "
                "data.split=leave-two-out"
            )

    def _open_record(self) -> TuningRecord:
        about = {
            "data": self.store.manifest.content_hash,
            "recipe": self.recipe.read_text(encoding="utf-8"),
            "settings": self.overrides,
        }
        found = TuningRecord.read(self.folder)
        if found is not None:
            found.check_same(about, self.folder)
            found.notes.clear()
            return found
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"{self.folder} is not empty and holds no search; choose another --out")
        return TuningRecord(about, self.metric.name, int((self.split.valid >= 0).sum()))

    def _settings(self, settings: Sequence[tuple[str, str]]) -> list[str]:
        """The overrides of a trial, as `--set` takes them."""
        fixed = [f"{key}={value}" for key, value in _OF_TRIALS.items()]
        return [*self.overrides, *fixed, *(f"{key}={value}" for key, value in settings)]

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record.seconds = self.elapsed()
        self.record.write(self.folder)

    def _measure_simple(self) -> None:
        """Measure the simple methods on the validation items: what the trials must beat."""
        config = dataclasses.replace(self.base, evaluate=self._kept(self.base).evaluate)
        task = make_task(config, DataFacts(self.store.num_items))
        began, limit = self.elapsed(), self.elapsed() + _MOST_SIMPLE * self.budget
        try:
            found = task.measure_baselines(
                self.store, self.split, "valid", should_stop=lambda: bool(self.stop) or self.elapsed() > limit
            )
        except Interrupted:
            if not self.stop:
                self.record.simple, self.record.simple_seconds = {}, self.elapsed() - began
                self._note(f"the simple methods take more than {_MOST_SIMPLE:.0%} of the time and are not in the table")
            return
        name = self.metric.name
        self.record.simple = {
            method: (one.metrics[name], one.standard_errors.get(name)) for method, one in found.items()
        }
        self.record.simple_seconds = self.elapsed() - began
        if found:
            best = self.metric.best([value for value, _ in self.record.simple.values()])
            method = list(found)[best or 0]
            self.report(f"best simple method: {method}, {name} {self.record.simple[method][0]:.4f} on validation")
        self._save()

    def _search(self) -> None:
        """Run trials until the time for them is up or nothing is left to try."""
        new = self._new_trials()
        processes: list[RunProcess] = []
        signalled = False
        with ending(processes):
            while True:
                over = bool(self.stop) or self.elapsed() + self._reserve() >= self.budget
                if not over and not signalled:
                    self._fill(new)
                processes[:] = [active.process for active in self._running.values()]
                if not self._running:
                    break
                if over and not signalled:
                    signalled = True
                    for process in processes:
                        process.process.send_signal(self.stop.signal or SIGINT)
                for active in [each for each in self._running.values() if each.process.process.poll() is not None]:
                    del self._running[active.trial.name]
                    self._ended(active, stopped=signalled)
                time.sleep(_POLL_SECONDS)
        self._say_what_was_not_tried()

    def _say_what_was_not_tried(self) -> None:
        if self.stop:
            return
        waiting = [trial for trial in self.record.trials if trial.newest is None and trial.failed is None]
        if waiting:
            self._note(f"{len(waiting)} trials were stopped by the end of the time before their first evaluation")
        if not self._exhausted:
            left = MOST_TRIALS - len(self.record.trials)
            self._note(
                f"the time ended before all was tried: up to {left} more trials; more --minutes with the same --out "
                "goes on"
            )

    def _fill(self, new: Iterator[Trial]) -> None:
        """Start trials while a job is free: promoted ones, then new ones, and when there are none the best that are
        not at their end."""
        while len(self._running) < self.jobs:
            trial = self._next() or self._new(new) or (None if self._running else self._next(last=True))
            if trial is None:
                return
            rung = len(trial.values)
            self._running[trial.name] = _Active(trial, rung, self._start(trial, rung))

    def _new(self, new: Iterator[Trial]) -> Trial | None:
        trial = None if self._exhausted else next(new, None)
        self._exhausted = trial is None
        if trial is not None:
            self.record.trials.append(trial)
        return trial

    def _next(self, *, last: bool = False) -> Trial | None:
        """The trial to go on with: one that was interrupted before its first rung, else a promotion."""
        trials, running = self.record.trials, self._running
        for trial in trials:
            if not trial.values and trial.failed is None and trial.name not in running:
                return trial
        num_rungs = len(self._rungs(self.base))
        return next_promotion(trials, running, num_rungs, higher_is_better=self.metric.higher_is_better, last=last)

    def _new_trials(self) -> Iterator[Trial]:
        """Yield the trials that the record does not have yet; settings that make no valid config are left out."""
        fixed = {override.partition("=")[0].strip() for override in self.overrides}
        num_events = int((self.split.train_end - self.store.offsets[:-1]).sum())
        known = {trial.settings for trial in self.record.trials}
        for number, settings in enumerate(settings_to_try(self.base, self.store.num_items, num_events, fixed)):
            if settings not in known and self._config(settings) is not None:
                yield Trial(f"{number:02d}", settings)

    def _config(self, settings: Sequence[tuple[str, str]]) -> Config | None:
        try:
            return resolve_against(load_config(self.recipe, self._settings(settings), plugins=self.plugins), self.store)
        except UserError:
            return None

    def _rungs(self, config: Config) -> list[int | None]:
        return rung_epochs(config.train.epochs, config.evaluate.every or 1)

    def _start(self, trial: Trial, rung: int) -> RunProcess:
        config = self._config(trial.settings)
        assert config is not None, "checked when the trial was made"
        rungs = self._rungs(config)
        until = rungs[min(rung, len(rungs) - 1)]
        trial.of_epochs = config.train.epochs
        self._save()
        command = self._command(str(self.recipe), self.folder / TRIALS / trial.name, self._settings(trial.settings))
        command += [] if until is None else ["--until-epoch", str(until)]
        return RunProcess(command, self.folder / LOGS / f"{trial.name}.log", jobs=self.jobs)

    def _command(self, recipe: str, run: Path, settings: Sequence[str]) -> list[str]:
        command = [*TRAIN, recipe, "--data", str(self.store.path), "--out", str(run), "--resume"]
        command += [part for setting in settings for part in ("--set", setting)]
        return command + [part for plugin in self.plugins for part in ("--plugins", str(plugin))]

    def _ended(self, active: _Active, *, stopped: bool) -> None:
        """Take over what a trial's process has measured."""
        trial, rung, process = active
        trial.seconds += process.seconds()
        if process.process.returncode and not stopped:
            trial.failed = process.reason()
            self._note(f"trial {trial.name} failed: {trial.failed}")
        evaluations = MetricLog.read(self.folder / TRIALS / trial.name).evaluations
        place = self.metric.best([record[self.metric.name] for record in evaluations]) if evaluations else None
        if place is not None and trial.failed is None:
            value = trial.newest = float(evaluations[place][self.metric.name])
            trial.standard_error = evaluations[place].get("standard_error")
            trial.epochs = float(evaluations[-1]["epoch"])
            if process.process.returncode == 0 and len(trial.values) == rung:
                trial.values.append(value)
            shown = ", ".join(f"{key}={value}" for key, value in trial.settings) or "the recipe"
            self.report(f"trial {trial.name}  epoch {trial.epochs:g}  {self.metric.name} {value:.4f}  {shown}")
        self._save()

    def _reserve(self) -> float:
        """Seconds to keep for training the best trial to its end and measuring it."""
        best = best_trial(self.record.trials, higher_is_better=self.metric.higher_is_better)
        training = 0.0
        if best is not None and best.of_epochs is not None and best.epochs:
            training = best.seconds / best.epochs * max(0.0, best.of_epochs - best.epochs)
        return min(training + self._finish_seconds(), _MOST_RESERVED * self.budget)

    def _finish_seconds(self) -> float:
        return _LEAST_FINISH + 2 * self.record.simple_seconds

    def _kept(self, config: Config) -> Config:
        """Return the config of a trial with what the kept run has and trials do without."""
        given = self.given
        return dataclasses.replace(
            config,
            evaluate=dataclasses.replace(config.evaluate, baselines=given.evaluate.baselines),
            deliver=dataclasses.replace(
                given.deliver, choose=given.deliver.choose if "deliver.choose" in self._fixed_keys() else "best"
            ),
            train=dataclasses.replace(
                config.train,
                copy_data=given.train.copy_data,
                tensorboard=given.train.tensorboard,
                profile=given.train.profile,
                keep_checkpoints=given.train.keep_checkpoints,
            ),
        )

    def _fixed_keys(self) -> set[str]:
        return {override.partition("=")[0].strip() for override in self.overrides}

    def _write_recipe(self, best: Trial) -> None:
        shown = ", ".join(f"{key}={value}" for key, value in best.settings) or "the recipe's own"
        error = "" if best.standard_error is None else f" ± {best.standard_error:.4f}"
        head = (
            f"# The best of {len(self.record.trials)} trials of `turbogr tune`: {shown}.\n"
            f"# {self.metric.name} {best.value:.4f}{error} (standard error) on the validation items.\n"
            "#   turbogr train recipe.yaml --data DIR --out RUN\n"
        )
        config = self._kept(load_run_config(self.folder / TRIALS / best.name))
        replace_text(self.folder / RECIPE, head + dump_config(config))

    def _train_best(self, best: Trial) -> None:
        """Resume a copy of the best trial to its end; where the time is short, end it where it is."""
        run = self.folder / BEST
        if self.record.best != best.name:
            shutil.rmtree(run, ignore_errors=True)
            aside = self.folder / f".{BEST}.part"
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(self.folder / TRIALS / best.name, aside)
            aside.rename(run)
            self.record.best, self.record.delivered = best.name, None
            self._save()
        if read_summary(run) is None or self.elapsed() < self.budget - self._finish_seconds():
            self.report(f"training the best, trial {best.name}, to its end")
            if not self._resume_best(run, []):
                return
        summary = read_summary(run)
        if summary is None:
            raise UserError(f"the best trial could not be trained to its end; see {self.folder / LOGS / 'best.log'}")
        self.record.delivered = summary.get("delivered")

    def _resume_best(self, run: Path, settings: list[str]) -> bool:
        """Train the best; False if a signal stopped it."""
        process = RunProcess(
            self._command(str(self.folder / RECIPE), run, settings), self.folder / LOGS / "best.log", jobs=1
        )
        shortened = False
        with ending([process]):
            while process.process.poll() is None:
                late = not settings and self.elapsed() > self.budget - self._finish_seconds()
                if (self.stop or (late and not _is_trained(run))) and not shortened:
                    shortened = True
                    process.process.send_signal(self.stop.signal or SIGINT)
                time.sleep(_POLL_SECONDS)
        if self.stop:
            return False
        if shortened and read_summary(run) is None:
            return self._end_now(run)
        if process.process.returncode:
            raise UserError(f"training the best trial failed: {process.reason()}")
        return True

    def _end_now(self, run: Path) -> bool:
        """End the best run at the epoch it has reached and measure it."""
        checkpoints = Checkpoints(run)
        newest = checkpoints.newest()
        assert newest is not None, "a trial with a value has a checkpoint"
        position = checkpoints.progress(newest).loader
        epochs = max(1, position["epoch"] + (position["step"] > 0))
        planned = load_run_config(run).train.epochs
        self._note(
            f"the time was too short to train the best to its end: {epochs} of {planned} epochs. "
            f"`turbogr train {self.folder / RECIPE} --data {self.store.path} --out RUN` trains all of it"
        )
        return self._resume_best(run, [f"train.epochs={epochs}"])

    def _note(self, sentence: str) -> None:
        if sentence not in self.record.notes:
            self.record.notes.append(sentence)
            self.report(sentence)

    def _nothing_trained(self) -> UserError:
        failed = [f"{trial.name}: {trial.failed}" for trial in self.record.trials if trial.failed is not None]
        if failed:
            return UserError(f"no trial could be trained; {failed[0]}. Logs are in {self.folder / LOGS}")
        return UserError(
            f"{self.budget / 60:g} minutes were too short for the first evaluation of any trial; give more --minutes "
            f"with the same --out, which goes on from there, or a smaller store"
        )

    def _result(self, best: Trial | None) -> TuneResult:
        kept = best is not None and (self.folder / BEST).exists()
        return TuneResult(
            self.folder,
            {} if best is None else dict(best.settings),
            self.metric.name,
            None if best is None or math.isnan(best.value) else best.value,
            None if best is None else best.standard_error,
            None if best is None else self.folder / RECIPE,
            self.folder / BEST if kept else None,
            self.record.delivered,
            self.record.table(higher_is_better=self.metric.higher_is_better).text(),
            [*self.record.notes, *self._conclusions(best)],
            self.stop.signal,
        )

    def _conclusions(self, best: Trial | None) -> list[str]:
        """What the reader should know of how sure the choice is."""
        found = []
        first = next((trial for trial in self.record.trials if not trial.settings and trial.newest is not None), None)
        if best is not None and first is not None and best is not first and best.standard_error is not None:
            gain = abs(best.value - first.value)
            if gain < best.standard_error:
                found.append(
                    f"the best is {gain:.4f} above the recipe itself, less than one standard error: it may be chance"
                )
        delivered = self.record.delivered
        if delivered is not None and delivered != self.base.model.name:
            found.append(f"{BEST} delivers {delivered}: what was best on the validation items")
        return found


def _is_trained(run: Path) -> bool:
    """Whether all that is left of a run is its summary."""
    checkpoints, config = Checkpoints(run), load_run_config(run)
    newest = checkpoints.newest()
    if newest is None:
        return False
    progress, patience = checkpoints.progress(newest), config.evaluate.patience
    ended = config.train.epochs is not None and progress.loader["epoch"] >= config.train.epochs
    return ended or (patience is not None and progress.stale_evaluations >= patience)
