"""Opening a run folder: its record, settings, data, metrics, and the model of one of its checkpoints.

Every command that reads a run opens it here, so each thing that can be wrong with a run has one message. `RunFolder`
reads files only and does not import torch; `load_model` and `open_run` do.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from turbogr.config import Config, load_run_config
from turbogr.data.split import Split
from turbogr.data.store import MANIFEST, Store
from turbogr.data.store_checksums import store_damages
from turbogr.data.store_copy import check_content, copy_store, store_bytes
from turbogr.errors import Note, UserError, warn_caller
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.evaluation.metrics import describe_metrics
from turbogr.plugins import load_plugins

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from turbogr.evaluation.scorer import Scorer
    from turbogr.models.table_encoder import TableEncoder
    from turbogr.tasks.retrieval import RetrievalTask
    from turbogr.tasks.task import Task

Record = dict[str, Any]
Which = Literal["best", "last"]

DATA_COPY = "data"  # folder of a run with a copy of its store
MOST_COPIED = 256 << 20  # bytes of data that train.copy_data=auto copies

_REMEDY = "name a folder that `turbogr train RECIPE --data DIR --out RUN` wrote"
_NOT_METRICS = frozenset(
    {"kind", "step", "part", "epoch", "num_users", "elapsed", "evaluation_seconds", "standard_error"}
)


@dataclass(frozen=True)
class RunFolder:
    """The files of a run; `record` is the content of run.json."""

    path: Path
    record: Record

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Read run.json of the run at `path`.

        Raises:
            UserError: not a run folder, or run.json cannot be read.
        """
        path = Path(path)
        if not path.is_dir():
            what = "is a file, not a run folder" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}; {_REMEDY}")
        absent = [name for name in ("run.json", "config.yaml") if not (path / name).is_file()]
        if absent:
            raise UserError(f"{path} is not a run folder (it has no {' and no '.join(absent)}); {_REMEDY}")
        try:
            record = json.loads((path / "run.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path / 'run.json'} is damaged: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path / 'run.json'} is damaged: it must hold a JSON object")
        return cls(path, record)

    def config(self) -> Config:
        """Return the config the run was trained with.

        Raises:
            UserError: config.yaml cannot be read, has a setting that this release does not know, or needs a plug-in
                that is neither installed nor loaded.
        """
        self.settings()
        return load_run_config(self.path)

    def settings(self) -> Record:
        """Return config.yaml as plain data: the sections of any release, unchecked.

        Raises:
            UserError: config.yaml cannot be read.
        """
        path = self.path / "config.yaml"
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from None
        if not isinstance(settings, dict):
            raise UserError(f"{path} is damaged: it must hold sections of settings")
        return settings

    def data(self) -> Record:
        """Return what run.json says about the data: path, content_hash, num_items and others.

        Raises:
            UserError: it does not say where the store is.
        """
        data = self.record.get("data")
        if not isinstance(data, dict) or not data.get("path"):
            raise UserError(f"{self.path / 'run.json'} does not say where the store is; say it with --data DIR")
        return data

    def store(self, data: str | Path | None = None) -> Store:
        """Open the store that the run was trained on: `data`, or the original, or else the run's own copy of it.

        Raises:
            UserError: there is no store, it holds other data, or the copy is damaged.
        """
        if data is None and self._has_copy():
            return self._original() or self._copy()
        folder = Path(self.data()["path"] if data is None else data)
        if data is None and not folder.exists():
            raise UserError(
                f"{self.path} was trained on {folder}, which does not exist, and has no copy of it; say where it is "
                "now with --data DIR"
            )
        return self._with_data_of_run(Store.open(folder))

    def _has_copy(self) -> bool:
        return (self.path / DATA_COPY / MANIFEST).is_file()

    def _original(self) -> Store | None:
        """Return the original store of a run that has a copy, None if it is not there or holds other data now."""
        facts = self.record.get("data")
        folder = Path(str(facts.get("path"))) if isinstance(facts, dict) else None
        if folder is None or not folder.exists():
            return None
        try:
            return self._with_data_of_run(Store.open(folder))
        except UserError as error:
            warnings.warn(f"{error}. {self.path / DATA_COPY} is used, the run's own copy", Note, stacklevel=3)
            return None

    def _copy(self) -> Store:
        store = self._with_data_of_run(Store.open(self.path / DATA_COPY))
        check_content(store)
        return store

    def _with_data_of_run(self, store: Store) -> Store:
        """Return `store` if its content is what the run was trained on, else raise UserError."""
        facts = self.record.get("data")
        expected = facts.get("content_hash") if isinstance(facts, dict) else None
        found = store.manifest.content_hash
        if expected is not None and found != expected:
            raise UserError(
                f"{store.path} does not hold the data that {self.path} was trained on (content {found[:12]}, not "
                f"{str(expected)[:12]}); give the original store with --data DIR, or train again"
            )
        return store

    def keep_data(self, store: Store, when: str) -> str | None:
        """Copy the data of the run into its folder and return None, or a sentence that says why it was not copied.

        `when` is the setting train.copy_data: "auto" copies at most `MOST_COPIED` bytes.
        """
        if when == "never" or self._has_copy():
            return None
        size = store_bytes(store)
        if when == "auto" and size > MOST_COPIED:
            return (
                f"the data, {size / 1e9:,.1f} GB, is not copied into {self.path}, which needs {store.path} to "
                "recommend and to be measured; train.copy_data=always copies it"
            )
        try:
            copy_store(store, self.path / DATA_COPY)
        except (OSError, UserError) as error:
            return f"the data could not be copied into {self.path}, which needs {store.path} to recommend: {error}"
        return None

    def num_items(self) -> int:
        """Return the number of items that the run was trained on.

        Raises:
            UserError: run.json does not say it.
        """
        data = self.record.get("data")
        if not isinstance(data, dict) or not isinstance(data.get("num_items"), int):
            raise UserError(f"{self.path / 'run.json'} is damaged: it does not say how many items the data has")
        return int(data["num_items"])

    def describe_metrics(self, names: Iterable[str]) -> list[MetricInfo]:
        """Return the descriptions of metrics, as run.json has them and in that order; others follow."""
        wanted = set(names)
        listed = self.record.get("metrics")
        read = [MetricInfo.read(entry) for entry in listed] if isinstance(listed, list) else []
        known = {info.name: info for info in read if info is not None and info.name in wanted}
        return [*known.values(), *describe_metrics(name for name in sorted(wanted) if name not in known)]


@dataclass(frozen=True)
class MetricLog:
    """The records of metrics.jsonl by kind, in the order of steps; `unreadable` are numbers of damaged lines, from 1.

    Where a resumed run repeats a step, the later record counts.
    """

    training: list[Record]
    evaluations: list[Record]
    unreadable: list[int]
    bad_steps: list[Record] = field(default_factory=list)
    stragglers: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> MetricLog:
        """Read metrics.jsonl; a run that has recorded nothing yet has no records."""
        try:
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            lines = []
        records: list[Record] = []
        unreadable: list[int] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                records.append(record)
            else:
                unreadable.append(number)
        training, evaluations, bad_steps, stragglers = (
            _last_attempt(records, kind) for kind in ("train", "eval", "bad_step", "stragglers")
        )
        return cls(training, evaluations, unreadable, bad_steps, stragglers)


def metrics_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of an evaluation's record in metrics.jsonl."""
    numbers = {
        str(name): float(value)
        for name, value in evaluation.items()
        if name not in _NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def protocol_text(result: Mapping[str, Any]) -> str:
    """Return the sentence that says what summary.json or evaluation.json measured; summaries of 0.1.0 have it alone."""
    protocol = result.get("protocol")
    return str((protocol.get("text") if isinstance(protocol, Mapping) else protocol) or "")


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint of a run. `which` is "last" where there is no best one yet; `epoch` is None where it is unknown."""

    step: int
    epoch: float | None
    which: Which


FITTED = ChosenCheckpoint(0, None, "best")
"""What stands for the checkpoint of a run that fits a simple method and has none."""


@dataclass(frozen=True)
class TrainedModel:
    """The task of one checkpoint, with its model and its tables by name, on one device, without gradients.

    Tables that training keeps in host memory beside an accelerator stay there.
    """

    folder: RunFolder
    config: Config
    checkpoint: ChosenCheckpoint
    task: Task
    tables: dict[str, Tensor]

    @property
    def encoder(self) -> TableEncoder:
        """The model as vectors of users and items.

        Raises:
            UserError: the run's task is not retrieval.
        """
        return self._retrieval().encoder(self.tables)

    def _retrieval(self) -> RetrievalTask:
        from turbogr.tasks.retrieval import RetrievalTask

        if not isinstance(self.task, RetrievalTask):
            raise UserError(
                f"{self.folder.path} is a run of the task '{self.task.name}', which does not recommend items; name a "
                "run of the task 'retrieval'"
            )
        return self.task

    @property
    def max_len(self) -> int:
        assert self.config.model.max_len is not None, "a run's config is resolved"
        return self.config.model.max_len


@dataclass(frozen=True)
class OpenedRun(TrainedModel):
    """A trained model with the store and split it was trained on."""

    store: Store
    split: Split

    @property
    def encoder(self) -> TableEncoder:
        """The model as vectors of users and items, those of items without a training event by their features.

        Raises:
            UserError: the run's task is not retrieval.
        """
        task = self._retrieval()
        return task.encoder(task.tables_with_cold_items(self.tables, self.store, self.split))

    @property
    def delivered(self) -> str | None:
        """What the run recommends with, in words; None for tasks that recommend nothing."""
        chosen = getattr(self.task, "delivered", None)
        return None if chosen is None else str(chosen.label)

    @property
    def recommender(self) -> Scorer:
        """What the run recommends with, as it was measured: the model, a simple method, or a sum of both.

        Raises:
            UserError: the run's task is not retrieval.
        """
        return self._retrieval().recommender(self.tables, self.store, self.split)


def load_model(run: str | Path, which: Which = "best", device: str | torch.device = "cpu") -> TrainedModel:
    """Load the best or last checkpoint of a run; the last one where no checkpoint was evaluated yet.

    `device` is where the model computes; "auto" is the accelerator if there is one.

    Raises:
        UserError: not a run, or it has no checkpoint.
    """
    return _load(RunFolder.open(run), which, device)


def run_damages(run: str | Path) -> dict[str, tuple[list[str], str | None]]:
    """Compare the checkpoints of a run, and its copy of the data, with their checksums; all files are read.

    Returns for each folder a sentence for each damaged file, and a remark on how it was compared.

    Raises:
        UserError: not a run.
    """
    from turbogr.checkpoints import Checkpoints
    from turbogr.parallel.tensor_files import has_checksums

    folder, found = RunFolder.open(run), {}
    checkpoints = Checkpoints(folder.path)
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        remark = None if has_checksums(path) else "an earlier release wrote it; what torch has stored was compared"
        found[str(path)] = (checkpoints.find_damages(step), remark)
    try:
        checkpoints.best()
    except UserError as error:
        found[str(checkpoints.folder)] = ([str(error)], None)
    if (folder.path / DATA_COPY).exists():
        found[str(folder.path / DATA_COPY)] = store_damages(folder.path / DATA_COPY)
    return found


def open_run(
    run: str | Path,
    *,
    data: str | Path | None = None,
    which: Which = "best",
    plugins: Sequence[str | Path] = (),
    device: str | torch.device = "auto",
) -> OpenedRun:
    """Open the best or last checkpoint of a run with the store it was trained on.

    `data` is where the store is now if it was moved and the run has no copy of it. `plugins` are the files and modules
    of the run's own components that are not installed: no file that the run names is imported unless it is given here.
    The backend of the operators becomes the run's, in this process. `device` is where the model computes; "auto" is the
    accelerator if there is one.

    Raises:
        UserError: not a run, no checkpoint, no store, a store with other data than the run was trained on, a plug-in
            that is not there, or a backend that this machine does not have.
    """
    from turbogr import ops
    from turbogr.simple.delivery import Delivered
    from turbogr.tasks.retrieval import RetrievalTask

    load_plugins(plugins)
    folder = RunFolder.open(run)
    store = folder.store(data)
    trained = _load(folder, which, device)
    ops.set_backend(trained.config.train.backend)  # a run is measured with the operators it was trained with
    use_products_of(trained.config)
    split = Split.of(store, trained.config.data.split)
    if isinstance(trained.task, RetrievalTask):
        trained.task.delivered = Delivered.read(folder.path, trained.task.model_name(trained.config))
    return OpenedRun(folder, trained.config, trained.checkpoint, trained.task, trained.tables, store, split)


def use_products_of(config: Config) -> None:
    """Compute large products as a run does; by PyTorch's library, with a note, where a provider of its is missing."""
    from turbogr import gemm_choice
    from turbogr.ops import projections

    choice = projections.uniform("torch")
    if config.train.gemm != "auto":
        choice = projections.parse_choice(config.train.gemm)
    reasons = {name: gemm_choice.unusable(name) for name in sorted(set(choice.values()))}
    missing = [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]
    if missing:
        choice = projections.uniform("torch")
        warn_caller(
            f"train.gemm={config.train.gemm}: this machine cannot compute the run's large products by "
            f"{', '.join(missing)}; PyTorch's library computes them, so scores differ in their last digits",
            Note,
        )
    projections.use(choice)


def _load(folder: RunFolder, which: Which, device: str | torch.device) -> TrainedModel:
    import torch

    from turbogr.accelerators import choose_device
    from turbogr.checkpoints import Checkpoints
    from turbogr.device_measurement import set_product_precision
    from turbogr.tasks import make_task
    from turbogr.tasks.task import DataFacts

    config = folder.config()
    if config.method is not None:
        return _load_method(folder, config)
    checkpoints = Checkpoints(folder.path)
    best = checkpoints.best() if which == "best" else None
    step = checkpoints.newest() if best is None else best
    if step is None:
        raise UserError(f"{folder.path} has no checkpoint yet; train it first with `turbogr train`")
    task = make_task(config, DataFacts(folder.num_items()))
    tables = {spec.name: torch.empty(spec.num_rows, spec.dim) for spec in task.tables}
    weights = {name: {"weight": weight} for name, weight in tables.items()}
    progress = checkpoints.restore({"model": dict(task.model.named_parameters()), "tables": weights}, step)
    task.model.eval().requires_grad_(False)
    chosen_device = choose_device(device, setting="device") if isinstance(device, str) else device
    task.model.to(chosen_device)
    set_product_precision(config.train.precision, chosen_device)
    if config.loss.segment_mb is None:
        tables = {name: weight.to(chosen_device) for name, weight in tables.items()}
    chosen = ChosenCheckpoint(step, progress.epochs, "last" if best is None else "best")
    return TrainedModel(folder, config, chosen, task, tables)


def _load_method(folder: RunFolder, config: Config) -> TrainedModel:
    """Open a run of a simple method, which is fitted when it is first used."""
    from turbogr.simple.method_settings import unset_settings
    from turbogr.tasks import make_task
    from turbogr.tasks.task import DataFacts

    unset = unset_settings(config.model.name, config.options)
    if unset:
        raise UserError(
            f"{folder.path} is not fitted yet: {', '.join(unset)} of {config.method} are not chosen; finish it with "
            "`turbogr train ... --resume`"
        )
    return TrainedModel(folder, config, FITTED, make_task(config, DataFacts(folder.num_items())), {})


def _last_attempt(records: Iterable[Record], kind: str) -> list[Record]:
    """Return the records of one kind in the order of steps, only the last one of a step and part."""
    latest: dict[tuple[Any, float], Record] = {}
    for record in records:
        step = record.get("step")
        if record.get("kind") == kind and isinstance(step, int | float):
            latest.pop((record.get("part"), step), None)
            latest[record.get("part"), step] = record
    return sorted(latest.values(), key=lambda record: record["step"])
