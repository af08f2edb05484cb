"""The training loop, for one run on one device.

A step: draw negatives, fetch the rows that the batch needs, loss, gradients, a look whether all is finite, update.
Everything that a step does is a function of (config, data, step): a run that is interrupted anywhere and resumed ends
with the same weights as one that was not.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from turbogr.config import Config
from turbogr.data.batching import Batch
from turbogr.data.loader import Loader
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluate.evaluator import Interrupted, evaluate
from turbogr.files import replace_text
from turbogr.layers.item_table import ItemTable
from turbogr.models import RetrievalModel
from turbogr.models.encoder import TableEncoder
from turbogr.models.flops import nominal_flops, strict_flops
from turbogr.negatives import make_sampler
from turbogr.random import derive_seed
from turbogr.train.checkpoint import Checkpoints, tensor_state
from turbogr.train.optimizers import DenseAdamW, lr_factor, make_row_optimizer
from turbogr.train.profile import Profiler
from turbogr.train.progress import Progress, Window
from turbogr.train.stopping import StopRequest
from turbogr.train.tracking import Tracker

Status = Literal["finished", "stopped early", "interrupted"]

_DROPOUT_SITE = 0xD0
_PROFILED_STEPS = range(10, 15)


class NonFiniteError(UserError):
    """The loss or a gradient is not finite; raised before any weight is touched."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; `signal` is what interrupted it."""

    run: Path
    status: Status
    step: int
    best_step: int | None
    best_value: float | None
    signal: int | None = None


class Trainer:
    """One run: the model, its data, its optimisers and how far it has come. The config must be resolved."""

    def __init__(
        self, config: Config, store: Store, run: Path, *, device: torch.device, gemm_peak: float | None
    ) -> None:
        assert config.model.dim is not None and config.model.max_len is not None, "resolve the config first"
        self.config, self.store, self.run, self.device, self.gemm_peak = config, store, run, device, gemm_peak
        self.split = Split.of(store, config.data.split)
        self.loader = Loader(
            store,
            self.split,
            max_len=config.model.max_len,
            batch_size=config.data.batch_size,
            batch_tokens=config.data.batch_tokens,
            window=config.data.window,
            seed=config.train.seed,
        )
        if not self.loader.num_sequences:
            raise UserError(
                f"{store.path} has no user with two or more training events under the split '{self.split.rule}'; "
                "use a log with longer histories or another split"
            )
        generator = torch.Generator().manual_seed(derive_seed(config.train.seed, 0))
        self.model = RetrievalModel(config.model)
        self.model.reset_parameters(generator)
        self.model.to(device)
        self.table = ItemTable(store.num_items, config.model.dim, device=device)
        self.table.reset_parameters(generator)
        self.sampler = make_sampler(config.loss, store.num_items, config.train.seed)
        self.dense = DenseAdamW(self.model, config.optimizer)
        self.rows = make_row_optimizer(self.table.weight, config.optimizer)
        self.checkpoints = Checkpoints(run, config.train.keep_checkpoints)
        self.progress = Progress()
        self._profiler = Profiler()
        self.num_steps = self._count_steps()
        """About how many steps the run has; exact when batches are counted in sequences."""
        self.part = config.evaluate.part or ("valid" if (self.split.valid >= 0).any() else "test")
        self.selected_by = (
            f"{self.part} {config.evaluate.metric}, seen items {'out' if config.evaluate.filter_seen else 'in'}"
        )

    def state(self) -> dict[str, Any]:
        """Every tensor that a checkpoint holds."""
        return tensor_state(self.model, self.table, self.dense, self.rows)

    def resume(self) -> None:
        """Go back to the newest checkpoint; without one, start from the beginning."""
        self.checkpoints.sweep()
        step = self.checkpoints.newest()
        if step is not None:
            self.progress = self.checkpoints.restore(self.state(), step)
            self.loader.load_state_dict(self.progress.loader)
            if self.progress.selected_by not in (None, self.selected_by):
                self._forget_best()
            self.checkpoints.note_best(self.progress)

    def _forget_best(self) -> None:
        """Values of another metric, part or filter say nothing about which checkpoint is best now."""
        progress = self.progress
        progress.best_value = progress.best_step = progress.best_epoch = progress.evaluated_step = None
        progress.stale_evaluations = 0

    def fit(self) -> TrainResult:
        """Train to the end, or until a signal, a plateau or a non-finite value, and leave a checkpoint of that point.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; the weights are those of the step before.
        """
        config, progress = self.config, self.progress
        self._wall_offset = progress.wall_seconds - time.perf_counter()
        with StopRequest() as stop, self._tracker() as tracker:
            try:
                while (status := self._status(stop)) is None:
                    if self._evaluation_due():
                        self._evaluate(tracker, stop)
                        self._checkpoint(tracker)
                        continue
                    for batch in self.loader:
                        self._step_and_profile(batch.to(self.device))
                        tracker.advance()
                        if progress.step % config.train.log_every == 0:
                            self._record_training(tracker)
                        if config.train.checkpoint_every and progress.step % config.train.checkpoint_every == 0:
                            self._checkpoint(tracker)
                        if stop or progress.step == config.train.steps:
                            break
            except Interrupted:
                status = "interrupted"
            except NonFiniteError:
                self._checkpoint(tracker)
                raise
            if status == "interrupted":
                self._checkpoint(tracker)
        return TrainResult(self.run, status, progress.step, progress.best_step, progress.best_value, stop.signal)

    def _checkpoint(self, tracker: Tracker) -> None:
        tracker.sync()
        self.progress.wall_seconds = time.perf_counter() + self._wall_offset
        self.checkpoints.save(self.state(), self.progress)

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

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Any]:
        """Return the mean loss over the tokens of a batch and the working set whose rows it depends on."""
        negatives = self.sampler.draw(batch.events, step)
        working_set = self.table.fetch(self.model.ids(batch, negatives))
        losses = self.model.loss(
            working_set.rows,
            working_set.index,
            batch,
            temperature=self.config.loss.temperature,
            seed=derive_seed(self.config.train.seed, _DROPOUT_SITE, step),
        )
        return losses.mean(), working_set

    def step(self, batch: Batch) -> None:
        """Train on one batch, which must be on the trainer's device."""
        started = time.perf_counter()
        progress, optimizer = self.progress, self.config.optimizer
        loss, working_set = self.loss(batch, progress.step)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None] + [working_set.rows.grad]
        norm = torch.nn.utils.get_total_norm(gradients)
        loss_value, norm_value = torch.stack([loss.detach(), norm]).tolist()
        if not (abs(loss_value) < float("inf") and norm_value < float("inf")):
            raise self._non_finite(batch, loss_value)
        if optimizer.clip_norm is not None:
            parameters = [*self.model.parameters(), working_set.rows]
            torch.nn.utils.clip_grads_with_norm_(parameters, optimizer.clip_norm, norm)
        factor = lr_factor(progress.step, self.num_steps, optimizer)
        self.dense.step(optimizer.lr * factor)
        self.rows.step(working_set.ids, working_set.rows.grad, (optimizer.table_lr or optimizer.lr) * factor)

        progress.step += 1
        progress.tokens += batch.num_tokens
        progress.loader = self.loader.state_dict()
        window = progress.window
        window.steps += 1
        window.loss_sum += loss_value * batch.num_tokens
        window.tokens += batch.num_tokens
        window.sequences += batch.num_sequences
        window.grad_norm = norm_value
        window.lr = optimizer.lr * factor
        strict = strict_flops(self.config.model, batch.items.lengths, self.config.loss.num_negatives)
        nominal = nominal_flops(self.config.model, batch.num_sequences)
        seconds = time.perf_counter() - started
        for totals in (window, progress):
            totals.strict_flops += strict
            totals.nominal_flops += nominal
            totals.seconds += seconds
        progress.epochs = self.epoch()

    def _step_and_profile(self, batch: Batch) -> None:
        """Train on one batch; some early steps, when all memory is there, are profiled for the report."""
        due = self.progress.step in _PROFILED_STEPS and self.config.train.profile and self.device.type == "cpu"
        with self._profiler if due else nullcontext():
            self.step(batch)
        if due:
            profile = {"steps": self._profiler.steps, "milliseconds": self._profiler.milliseconds()}
            replace_text(self.run / "profile.json", json.dumps(profile, indent=2) + "\n")

    def _status(self, stop: StopRequest) -> Status | None:
        """Return how the run ends if it ends here, else None; a due evaluation comes first."""
        train, progress = self.config.train, self.progress
        if stop:
            return "interrupted"
        if self._evaluation_due():
            return None
        patience = self.config.evaluate.patience
        if patience is not None and progress.stale_evaluations >= patience:
            return "stopped early"
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

    def _evaluate(self, tracker: Tracker, stop: StopRequest) -> None:
        config, progress = self.config.evaluate, self.progress
        started = time.perf_counter()
        self._record_training(tracker)
        encoder = TableEncoder(self.model, self.table)
        result = evaluate(
            encoder,
            self.store,
            self.split,
            self.part,
            max_len=self.model.max_len,
            ks=config.ks,
            filter_seen=config.filter_seen,
            batch_size=config.batch_size,
            should_stop=lambda: bool(stop),
        )
        seconds = time.perf_counter() - started
        value = result.metrics[config.metric]
        better = progress.best_value is None or value > progress.best_value
        progress.stale_evaluations = 0 if better else progress.stale_evaluations + 1
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
            },
        )
        shown = [config.metric, *(name for name in ("hr@10", "ndcg@10", "mrr") if name != config.metric)]
        figures = "  ".join(f"{name} {result.metrics[name]:.4f}" for name in shown if name in result.metrics)
        tracker.say(f"epoch {self.epoch():g}  {self.part}  {figures}{'  best so far' if better else ''}")

    def _record_training(self, tracker: Tracker) -> None:
        progress, window = self.progress, self.progress.window
        if not window.steps:
            return
        seconds = max(window.seconds, 1e-9)
        values = {
            "epoch": self.epoch(),
            "loss": window.loss_sum / window.tokens,
            "lr": window.lr,
            "grad_norm": window.grad_norm,
            "tokens": progress.tokens,
            "tokens_per_second": window.tokens / seconds,
            "sequences_per_second": window.sequences / seconds,
            "elapsed": progress.seconds,
        }
        shown = {"loss": f"{values['loss']:.3f}", "tokens/s": f"{values['tokens_per_second']:,.0f}"}
        if self.gemm_peak is not None:
            values["mfu_strict"] = window.strict_flops / seconds / self.gemm_peak
            values["mfu_nominal"] = window.nominal_flops / seconds / self.gemm_peak
            shown["mfu"] = f"{values['mfu_strict']:.1%}"
        tracker.show(**shown)
        progress.metrics_bytes = tracker.record("train", progress.step, values)
        progress.window = Window()

    def _tracker(self) -> Tracker:
        return Tracker(
            self.run,
            metrics_bytes=self.progress.metrics_bytes,
            step=self.progress.step,
            num_steps=self.num_steps,
            tensorboard=self.config.train.tensorboard,
        )

    def _non_finite(self, batch: Batch, loss: float) -> NonFiniteError:
        users = batch.users.cpu().numpy()
        shown = ", ".join(str(user) for user in self.store.user_ids.decode(users[:5]))
        more = f" and {len(users) - 5} more" if len(users) > 5 else ""
        what = "the loss" if not abs(loss) < float("inf") else "a gradient"
        names = [n for n, p in self.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        where = f" ({', '.join(names[:3])})" if what == "a gradient" and names else ""
        return NonFiniteError(
            f"{what}{where} is not finite at step {self.progress.step + 1}; users of the batch: {shown}{more}. "
            f"No weight was changed, and a checkpoint of step {self.progress.step} is kept. Try a lower "
            "optimizer.lr, optimizer.clip_norm=1, or warm-up, and continue with --resume"
        )


def choose_device(name: str) -> torch.device:
    """Return the device that `train.device` names; auto takes the accelerator if there is one.

    Raises:
        UserError: a device that this machine or this build of PyTorch does not have.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"train.device '{name}' cannot be used here: {reason}; use auto or cpu") from error
    return device
