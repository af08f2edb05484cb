"""The training loop of one run, on one rank or many.

A step fetches the rows that the batch needs, computes loss and gradients, checks that all is finite, and updates
(`step.py`). The executor decides which of these stages run early (`pipeline/`). A step is a function of (config, data,
step), so a run that is interrupted anywhere and resumed ends with the same weights as one that was not. With many ranks
each runs this same loop on its part of every batch, and all decisions rest on values that are equal on all of them.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from turbogr.checkpoints import Checkpoints
from turbogr.config import Config
from turbogr.data.batching import Batch
from turbogr.data.cost import CostModel
from turbogr.data.loader import Loader
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import Note, RankLost, UserError, warn_caller
from turbogr.evaluation.job_pool import Interrupted
from turbogr.evaluation.metric_info import one_per_family
from turbogr.evaluation.metrics import margin
from turbogr.evaluation.progress_lines import ProgressLines
from turbogr.files import replace_text
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World, before_ending
from turbogr.progress import Progress, Window
from turbogr.tables.working_set import WorkingSets
from turbogr.training.bad_steps import BadStep, NonFiniteError, RewindNeeded, decide, examine, is_bad
from turbogr.training.checkpoint_selection import selecting_part
from turbogr.training.dense_optimizer import lr_factor
from turbogr.training.metric_log import SilentTracker, Tracker
from turbogr.training.operator_times import Profiler
from turbogr.training.pipeline import make_executor
from turbogr.training.pipeline.executor import Executor, PendingBatch
from turbogr.training.pipeline.serial import Serial
from turbogr.training.pipeline.workers import stage
from turbogr.training.step import Measured, Stepper
from turbogr.training.step_clock import StepClock
from turbogr.training.stopping import AgreedStop
from turbogr.training.stragglers import StragglerReport, StragglerWatch
from turbogr.training.survivor_state import load_parts, newest_parts, remove_parts, save_part
from turbogr.training.timeline import Timeline
from turbogr.training.training_record import training_record

Status = Literal["finished", "stopped early", "interrupted"]

_UPDATE_SECONDS = 10.0
_PROFILED_STEPS = range(10, 15)
_SAVE_FAILED = 1 << 10  # what a rank sends in place of a signal; larger than all of these


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; `signal` is what interrupted it, `skipped_steps` had a value that was not finite."""

    run: Path
    status: Status
    step: int
    best_step: int | None
    best_value: float | None
    signal: int | None = None
    skipped_steps: tuple[int, ...] = ()


class Trainer:
    """One run: the model, its data, its optimisers and how far it has come. The config must be resolved.

    `peak_flops` is the 100 % of MFU (`peak.Peak.flops`), that of all ranks of the `mesh` together.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        run: Path,
        *,
        device: torch.device,
        peak_flops: float | None,
        mesh: Mesh | None = None,
    ) -> None:
        assert config.model.dim is not None and config.model.max_len is not None, "resolve the config first"
        self.config, self.store, self.run, self.device, self.peak_flops = config, store, run, device, peak_flops
        self.mesh = mesh or Mesh(World())
        self.world = self.mesh.world
        self.split = Split.of(store, config.data.split)
        counts = partial(store.item_counts, self.split.train_end)
        self.stepper = Stepper(config, store.num_items, device=device, mesh=self.mesh, counts=counts, store=store)
        self.task, self.model, self.tables = self.stepper.task, self.stepper.model, self.stepper.tables
        self.loader = Loader(
            store,
            self.split,
            max_len=config.model.max_len,
            batch_size=config.data.batch_size,
            batch_tokens=config.data.batch_tokens,
            window=config.data.window,
            seed=config.train.seed,
            rank=self.world.rank,
            num_ranks=self.world.size,
            balance=config.parallel.balance,
            cost=None if config.parallel.cost is None else CostModel(*config.parallel.cost),
            speeds=config.parallel.speeds,
            plan_ranks=config.data.plan_ranks,
            plan_window=config.data.plan_window,
            plan_cost=None if config.data.plan_ranks is None else self._counted_cost(config.model.max_len),
            skip_repeats=config.data.repeated_targets == "skip",
            every_event=self.task.predicts_actions,
            with_step_targets=self.stepper.task.needs_step_targets,
            columns=self.stepper.task.columns,
        )
        if not self.loader.num_sequences:
            raise UserError(
                f"{store.path} has no user with two or more training events under the split '{self.split.rule}'; "
                "use a log with longer histories or another split"
                if not self.loader.num_targets_skipped
                else f"all {self.loader.num_targets_skipped:,} training targets of {store.path} are items that the "
                "user has had before, and data.repeated_targets=skip leaves them out; set data.repeated_targets=train"
            )
        if self.loader.plan_is_refused:
            warn_caller(
                f"data.plan_ranks={config.data.plan_ranks}: planned steps would vary more in tokens than random ones, "
                "so steps are not planned; more sequences per rank (data.batch_size) help",
                Note,
            )
        self.timeline = Timeline(self.world.rank, device)
        self.executor = make_executor(self.stepper, config.pipeline, self.timeline)
        self.checkpoints = Checkpoints(run, config.train.keep_checkpoints, self.world)
        self._is_prepared = False
        self.stop = AgreedStop(self.world)
        self.progress = Progress()
        self.until_epoch: int | None = None
        """Epoch after which training pauses: it ends as if interrupted, to be resumed."""
        self._updating, self._is_between_steps = threading.Lock(), True
        """While an update begins, `progress` and what is updated do not fit together; nor if it has failed."""
        self._profiler = Profiler()
        self._bad_steps: list[tuple[BadStep, str]] = []
        """Bad steps that are not recorded yet, and what was done about each."""
        self._stragglers = StragglerWatch(
            self.world.gather_objects(socket.gethostname()),
            self.loader.speeds.tolist(),
            balances=self.loader.balance != "none",
        )
        self._straggler_reports: list[StragglerReport] = []
        self.num_steps = self._count_steps()
        """About how many steps the run has; exact when batches are counted in sequences."""
        self.part = selecting_part(config, self.split)
        self.selected_by = f"{self.part} {config.evaluate.metric}, {self.task.describe_rule(config.evaluate)}"

    def _counted_cost(self, max_len: int) -> CostModel:
        """The cost of sequences in FLOPs: the same on every machine, so that batches are, too."""
        half, whole = (self.task.flops(torch.tensor([length])).strict for length in (max_len, 2 * max_len))
        b = max(0.0, (whole - 2 * half) / (2 * max_len**2))
        return CostModel((half - b * max_len**2) / max_len, b)

    def state(self) -> dict[str, Any]:
        """Every tensor that a checkpoint holds, all updates of the steps so far done."""
        self.executor.finish_updates()
        at_start = self.progress.loader["step"] == 0
        past_weights = [] if at_start else self.executor.past_weights()
        self.progress.earlier_tables = len(past_weights)
        return self.stepper.state(past_weights)

    def resume(self) -> None:
        """Go back to the newest checkpoint that is whole; without any, start from the beginning."""
        self.checkpoints.sweep()
        step = self.checkpoints.newest_intact()
        if self._resume_from_survivors(-1 if step is None else step):
            return
        if step is not None:
            self._load(step)

    def _resume_from_survivors(self, newest: int) -> bool:
        """Take over what the ranks that remained of an earlier attempt have kept, if it is newer than a checkpoint."""
        parts = self.world.gather_objects(newest_parts(self.run, newest) if self.world.is_first else [])[0]
        if parts:
            self.progress, past_weights = load_parts(parts, self.run, self.stepper)
            self._continue_with(past_weights)
            self.checkpoints.save(self.state(), self.progress)
        self.world.run_on_first(lambda: remove_parts(self.run))
        return bool(parts)

    def _keep_for_survivors(self) -> None:
        """Another rank is lost: keep what this one has, so that no step since the last checkpoint is lost."""
        step = self.progress.step
        if step in self.checkpoints.steps():
            return
        if not (self._is_between_steps and self.executor.is_complete()):
            print(f"the updates of step {step} are not complete, so the last checkpoint counts", file=sys.stderr)
            return
        self.progress.wall_seconds = time.perf_counter() + self._wall_offset
        at_start = self.progress.loader["step"] == 0
        try:
            save_part(self.run, self.stepper, self.progress, [] if at_start else self.executor.past_weights())
        except OSError as error:  # what ended the job is what the user must know first
            reason = error.strerror or error
            print(f"step {step} could not be kept ({reason}), so the last checkpoint counts", file=sys.stderr)

    def _keep_while_waiting(self) -> None:
        """The same, in another thread, while the main thread waits for a rank that does not answer."""
        if self._updating.acquire(timeout=_UPDATE_SECONDS):
            self._keep_for_survivors()  # and no update begins any more: the process ends

    def _load(self, step: int) -> None:
        """Take over the state of a checkpoint."""
        num_past = self.checkpoints.progress(step).earlier_tables
        past_weights = [[torch.empty_like(weight) for weight in self.tables.weights] for _ in range(num_past)]
        state = self.stepper.state(past_weights)
        self.progress = self.checkpoints.restore(state, step)
        self.stepper.adopt(state, past_weights)
        self._continue_with(past_weights)

    def _continue_with(self, past_weights: Sequence[Sequence[Tensor]]) -> None:
        """Go on as `self.progress` says; the tensors are loaded already."""
        self.executor.restore_past_weights(past_weights)
        self.loader.load_state_dict(self.progress.loader)
        if self.progress.selected_by not in (None, self.selected_by):
            self._forget_best()
        best = self.progress.best_step
        if best in self.checkpoints.steps() and (damages := self.checkpoints.find_damages(best)):
            self.checkpoints.put_away(best, damages, "the best checkpoint is chosen among later ones")
            self._forget_best()
        self.checkpoints.note_best(self.progress)

    def _go_back(self, bad: BadStep) -> None:
        """Take over the newest checkpoint whose state is finite, to train again from there without the bad step."""
        skipped = sorted({*self.progress.skipped_steps, bad.step})
        self.checkpoints.finish()
        while (step := self.checkpoints.newest_intact()) is not None:
            self._load(step)
            if all(self.world.gather_objects(self.stepper.is_finite())):
                break
            self.checkpoints.remove(step)
        else:
            raise NonFiniteError(f"{bad}; {bad.details}. No checkpoint has finite weights; start a new run")
        self.progress.skipped_steps = skipped
        self._bad_steps.append((bad, f"went back to step {step}"))

    def _forget_best(self) -> None:
        """Values of another metric, part, filter or rule say nothing about which checkpoint is best now."""
        progress = self.progress
        progress.best_value = progress.best_step = progress.best_epoch = progress.evaluated_step = None
        progress.stale_evaluations = 0

    def fit(self) -> TrainResult:
        """Train to the end, or until a signal, a plateau or a non-finite value, and leave a checkpoint of that point.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; the weights are those of the step before.
        """
        self._wall_offset = self.progress.wall_seconds - time.perf_counter()
        self.stop = stop = AgreedStop(self.world)
        if self.config.train.timeline == "all":
            self.timeline.stream_to(self.run)
        with stop, before_ending(self._keep_while_waiting):
            while True:
                try:
                    with self._tracker() as tracker:
                        status = self._fit(tracker)
                    break
                except RewindNeeded as request:
                    self._go_back(request.bad)
                except RankLost:
                    self._keep_for_survivors()
                    raise
        progress = self.progress
        return TrainResult(
            self.run,
            status,
            progress.step,
            progress.best_step,
            progress.best_value,
            stop.signal,
            tuple(progress.skipped_steps),
        )

    def _fit(self, tracker: Tracker | SilentTracker) -> Status:
        """Train from where the progress stands to an end."""
        progress, train = self.progress, self.config.train
        try:
            if self._bad_steps or (train.on_bad_step == "rewind" and self.checkpoints.newest() is None):
                self._record_bad_steps(tracker)
                self._checkpoint(tracker)  # to go back to; after that, to remember which step is left out
            while (status := self._status()) is None:
                if self._evaluation_due():
                    self._evaluate(tracker)
                    self._checkpoint(tracker)
                    continue
                with self.batches() as batches:
                    for pending in batches:
                        self._step_and_profile(pending)
                        self._prepare_to_save()
                        self.timeline.flush()
                        tracker.advance()
                        self._record_bad_steps(tracker)
                        self._record_stragglers(tracker)
                        if progress.step % train.log_every == 0:
                            self._record_training(tracker)
                        if train.checkpoint_every and progress.step % train.checkpoint_every == 0:
                            self._checkpoint(tracker)
                        if self.stop:
                            break
        except Interrupted:
            self.stop.agree_now()
            status = "interrupted"
        except NonFiniteError:
            self._checkpoint(tracker)
            self.checkpoints.finish()
            raise
        except RewindNeeded:
            raise
        except BaseException:
            self.checkpoints.abandon()
            raise
        finally:
            self.timeline.flush(least=1)
        if status == "interrupted":
            self._checkpoint(tracker)
        self.checkpoints.finish()
        return status

    @contextmanager
    def batches(self) -> Iterator[Iterator[PendingBatch]]:
        """Yield the batches of the rest of the epoch; the executor's work on later ones ends with the block."""
        limit = self.config.train.steps
        left = None if limit is None else limit - self.progress.step
        try:
            with closing(self.executor.batches(self.loader, self.progress.step, left)) as batches:
                yield batches
            self.executor.close()
        except (NonFiniteError, RewindNeeded):
            self.executor.close()
            raise
        except BaseException:
            self.executor.abandon()
            raise

    def _prepare_to_save(self) -> None:
        """After the first step, when the memory of a step is in use, make the buffers for saves in the background.

        Where ranks share a table, its rows are exchanged into copies and most of the state needs no buffer.
        """
        if self.config.train.background_save and not self._is_prepared and self.mesh.members == 1:
            self.checkpoints.prepare(self.stepper.state())
        self._is_prepared = True

    def _checkpoint(self, tracker: Tracker | SilentTracker) -> None:
        tracker.sync()
        self.progress.wall_seconds = time.perf_counter() + self._wall_offset
        self.checkpoints.save(self.state(), self.progress, background=self.config.train.background_save)
        if self.world.is_first:
            self.timeline.write(self.run)

    def _count_steps(self) -> int:
        limits = []
        if self.config.train.epochs is not None:
            limits.append(self.config.train.epochs * self.loader.num_batches(0))
        if self.config.train.steps is not None:
            limits.append(self.config.train.steps)
        return min(limits)

    def epoch(self) -> float:
        """Epochs done so far, as a fraction."""
        position = self.progress.loader
        return position["epoch"] + position["step"] / self.loader.num_batches(position["epoch"])

    def step(self, batch: Batch | PendingBatch) -> None:
        """Train on one batch, which must be on the trainer's device; with many ranks, on all their parts of it.

        A plain batch is fetched and learnt alone, as by the serial executor.

        Raises:
            NonFiniteError: the loss or a gradient is not finite and train.on_bad_step does not go on; no weight is
                changed.
            RewindNeeded: the same, where training goes back.
            StageFailed: anything else; it names the stage and the step. A UserError keeps its type and names them too.
        """
        progress, optimizer, stepper = self.progress, self.config.optimizer, self.stepper
        executor: Executor = self.executor
        if isinstance(batch, Batch):
            prepared = stepper.prepare(batch, progress.step)
            pending = PendingBatch(progress.step, prepared, self.loader.state_dict())
            executor = Serial(stepper, self.timeline)
        else:
            pending = batch
        clock = StepClock(executor)
        if self.task.is_due(pending.step):
            with stage("negatives", pending.step):
                executor.finish_updates()
                self.task.refresh(self.tables, pending.step)
        with stage("embed", pending.step):
            sets = executor.fetch(pending)
        with stage("dense", pending.step), self.timeline.span("main", "dense", pending.step):
            loss = stepper.compute(pending.batch, sets, pending.step)
        with stage("reduce", pending.step):
            reduced = executor.reduce(pending, sets)
        with stage("agree", pending.step):
            own_signal = _SAVE_FAILED if self.checkpoints.failed else self.stop.own_signal
            measured = executor.measure(pending, sets, reduced, loss, own_signal)
        if measured.signal == _SAVE_FAILED:
            self.checkpoints.finish()
        self.stop.agree(measured.signal)
        if measured.loads is not None and (report := self._stragglers.add(measured.loads.numpy())) is not None:
            self._straggler_reports.append(report)
        skips = pending.step + 1 in progress.skipped_steps
        if is_bad(measured) and not skips:
            self._leave_out(pending, sets, measured)
            skips = True
        factor = lr_factor(pending.step, self.num_steps, optimizer)
        with stage("update", pending.step), self._updating:
            self._is_between_steps = False
            if skips:
                executor.skip(pending, sets, reduced)
            else:
                executor.update(pending, sets, reduced, measured.grad_norm, factor)
            progress.step += 1
            progress.loader = pending.position
            self._is_between_steps = True
        progress.window.lr = optimizer.lr * factor
        self._count(pending, None if skips else measured, clock)
        if self.config.parallel.check_every and progress.step % self.config.parallel.check_every == 0:
            executor.finish_updates()
            stepper.check_replicas(executor.updated, progress.step)

    def _leave_out(self, pending: PendingBatch, sets: WorkingSets, measured: Measured) -> None:
        """Note a bad step whose update is left out, or raise what train.on_bad_step demands."""
        with stage("examine", pending.step):
            bad = examine(self.stepper, self.store, pending.batch, sets, pending.step, measured)
        decide(bad, self.config.train, self.progress.skipped_steps)
        self.progress.skipped_steps.append(bad.step)
        self._bad_steps.append((bad, "skipped"))

    def _count(self, pending: PendingBatch, measured: Measured | None, clock: StepClock) -> None:
        """Add a step to the totals of the run and of the window; without `measured` it has taught nothing."""
        progress, window, lengths = self.progress, self.progress.window, pending.batch.lengths_of_step
        num_tokens, num_sequences = int(lengths.sum()), lengths.numel()
        progress.tokens += num_tokens
        window.steps += 1
        window.tokens += num_tokens
        window.sequences += num_sequences
        if measured is not None:
            num_trained = pending.batch.num_trained_of_step
            window.loss_sum += measured.loss * num_trained
            window.trained += num_trained
            window.grad_norm, window.grad_norm_summed = measured.grad_norm, measured.summed
            window.rows_read += measured.rows_read
            window.rows_shared += measured.rows_shared
        window.staleness = max(window.staleness, pending.staleness)
        clock.stop(window)
        planned = self.loader.cost.step_cost(pending.batch.at_hand.items.lengths.numpy())
        self.stepper.own_load = (clock.own_seconds, planned)
        flops = self.task.flops_of(pending.batch)
        for totals in (window, progress):
            totals.strict_flops += flops.strict
            totals.nominal_flops += flops.nominal
            totals.seconds += clock.seconds
        progress.epochs = self.epoch()

    def _step_and_profile(self, pending: PendingBatch) -> None:
        """Train on one batch; some early steps, when all memory is there, are profiled on rank 0 for the report."""
        due = self.progress.step in _PROFILED_STEPS and self.config.train.profile and self.device.type == "cpu"
        due = due and self.world.is_first
        with self._profiler if due else nullcontext():
            self.step(pending)
        if due:
            profile = {"steps": self._profiler.steps, "milliseconds": self._profiler.milliseconds()}
            replace_text(self.run / "profile.json", json.dumps(profile, indent=2) + "\n")

    def _status(self) -> Status | None:
        """Return how the run ends if it ends here, else None; a due evaluation comes first."""
        train, progress = self.config.train, self.progress
        if self.stop:
            return "interrupted"
        if self._evaluation_due():
            return None
        patience = self.config.evaluate.patience
        if patience is not None and progress.stale_evaluations >= patience:
            return "stopped early"
        if self.until_epoch is not None and progress.loader["epoch"] >= self.until_epoch:
            return "interrupted"
        return "finished" if self._all_steps_done(train.epochs, train.steps) else None

    def _all_steps_done(self, epochs: int | None, steps: int | None) -> bool:
        progress = self.progress
        return (steps is not None and progress.step >= steps) or (
            epochs is not None and progress.loader["epoch"] >= epochs
        )

    def _evaluation_due(self) -> bool:
        progress = self.progress
        if progress.step == 0 or progress.evaluated_step == progress.step:
            return False
        ended = self._all_steps_done(self.config.train.epochs, self.config.train.steps)
        at_epoch = progress.loader["step"] == 0 and progress.loader["epoch"] % (self.config.evaluate.every or 1) == 0
        return ended or at_epoch

    def _evaluate(self, tracker: Tracker | SilentTracker) -> None:
        config, progress = self.config.evaluate, self.progress
        started = time.perf_counter()
        self._record_training(tracker)
        total = self.task.num_measured(self.split, self.part, self.world.size)
        lines = ProgressLines(f"measuring the {self.part} items", total, say=tracker.say)
        result = self.task.evaluate(
            self.tables.gather_all(),
            self.store,
            self.split,
            self.part,
            progress=lines.advance,
            should_stop=lines.watching(self.stop.is_requested),
            world=self.world,
        )
        seconds = time.perf_counter() - started
        assert config.metric is not None, "resolve the config first"
        value = result.metrics[config.metric]
        error = getattr(result, "standard_errors", {}).get(config.metric)
        (selecting,) = self.task.describe_metrics([config.metric])
        better = progress.best_value is None or selecting.is_better(value, progress.best_value)
        worse = not better and is_worse(value, progress.best_value, config.min_drop * (error or 0.0))
        progress.stale_evaluations = 0 if better else progress.stale_evaluations + worse
        progress.evaluated_step, progress.selected_by = progress.step, self.selected_by
        if better:
            progress.best_value, progress.best_step, progress.best_epoch = value, progress.step, self.epoch()
        progress.metrics_bytes = tracker.record(
            "eval",
            progress.step,
            {
                "part": self.part,
                "epoch": self.epoch(),
                **result.metrics,
                "num_users": result.num_users,
                "elapsed": progress.seconds,
                "evaluation_seconds": seconds,
                **({} if error is None else {"standard_error": error}),
            },
        )
        others = [info.name for info in one_per_family(self.task.describe_metrics(result.metrics)) if info != selecting]
        interval = "" if error is None else f" ± {margin(error, result.num_users):.4f}"
        figures = "  ".join(
            [f"{config.metric} {value:.4f}{interval}", *(f"{n} {result.metrics[n]:.4f}" for n in others)]
        )
        tracker.say(f"epoch {self.epoch():g}  {self.part}  {figures}{'  best so far' if better else ''}")

    def _record_training(self, tracker: Tracker | SilentTracker) -> None:
        progress = self.progress
        if progress.window.trained:
            values, shown = training_record(progress, epoch=self.epoch(), peak_flops=self.peak_flops)
            tracker.show(**shown)
            progress.metrics_bytes = tracker.record("train", progress.step, values)
            progress.window = Window()

    def _tracker(self) -> Tracker | SilentTracker:
        if not self.world.is_first:
            return SilentTracker()
        return Tracker(
            self.run,
            metrics_bytes=self.progress.metrics_bytes,
            step=self.progress.step,
            num_steps=self.num_steps,
            tensorboard=self.config.train.tensorboard,
        )

    def _record_bad_steps(self, tracker: Tracker | SilentTracker) -> None:
        """Write and print which steps were left out, and why."""
        for bad, action in self._bad_steps:
            self.progress.metrics_bytes = tracker.record("bad_step", bad.step, bad.to_record(action))
            tracker.say(f"{bad}; {bad.details}. Its update is left out{'' if action == 'skipped' else f', {action}'}")
        self._bad_steps.clear()

    def _record_stragglers(self, tracker: Tracker | SilentTracker) -> None:
        """Write and print which ranks are slow, where that has changed."""
        for report in self._straggler_reports:
            self.progress.metrics_bytes = tracker.record("stragglers", self.progress.step, report.to_record())
            tracker.say(str(report))
        self._straggler_reports.clear()


def is_worse(value: float, best: float | None, noise: float) -> bool:
    """Whether a value that is not the best lies further from it than `noise`; one that is not finite does."""
    assert best is not None, "the first value is the best"
    return not abs(value - best) <= noise or noise == 0
