"""Loader: the training batches of every epoch, from any position."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence

import numpy as np
import torch

from turbogr.data.balance import Strategy, check_speeds, resolve_strategy, share_step
from turbogr.data.batching import Batch, plan_batches, training_batch, training_sequences, training_targets
from turbogr.data.cost import CostModel
from turbogr.data.repeats import RepeatedEvents
from turbogr.data.split import Split
from turbogr.data.step_windows import PlannedSteps, plan_windows
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array


class Loader:
    """The training batches of every epoch, and the position of the next one.

    Batch (epoch, step) depends on the store, the options and the seed alone. Of `num_ranks` ranks, each gets its part
    of it, possibly none of its sequences, and the lengths of all. How ranks share a batch is `balance`, with `cost` and
    `speeds` as in `turbogr.data.balance.plan_steps`. While a batch is being used, the position is already that of the
    next one, so a state saved then continues without repeating or skipping anything, on any number of ranks.
    With `plan_ranks`, `plan_window` steps are planned together for that many ranks, by `plan_cost` (`step_windows.py`).
    With `skip_repeats`, a target that the user has had before does not count in the loss, and a sequence without any
    other target is left out. With `every_event`, batches have no targets: every training event is an input, with its
    actions. `with_step_targets` lets every rank also read the targets of the whole step. `columns` has
    the key of every feature and action that batches carry, or a kept column, by the feature's name.

    Raises:
        ValueError: not exactly one of batch_size and batch_tokens is given, or an option is out of range.
    """

    def __init__(
        self,
        store: Store,
        split: Split,
        *,
        max_len: int,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        seed: int = 0,
        window: str = "last",
        shuffle: bool = True,
        rank: int = 0,
        num_ranks: int = 1,
        balance: Strategy = "auto",
        cost: CostModel | None = None,
        speeds: Sequence[float] | None = None,
        plan_ranks: int | None = None,
        plan_window: int = 32,
        plan_cost: CostModel | None = None,
        skip_repeats: bool = False,
        every_event: bool = False,
        with_step_targets: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        assert plan_ranks is None or (batch_size is not None and shuffle), "planned are shuffled batches of sequences"
        assert not (every_event and (skip_repeats or with_step_targets)), "events without targets"
        self.rank, self.num_ranks = rank, num_ranks
        self.with_step_targets = with_step_targets
        self.columns = dict(columns or {})
        self.store = store
        starts = np.asarray(store.offsets[:-1])
        self.sequences = training_sequences(starts, split.train_end, max_len, window, every_event=every_event)
        self.num_targets_skipped = 0
        """Targets of an epoch that do not count in the loss."""
        self._repeated: RepeatedEvents | None = None
        if skip_repeats:
            self._skip_repeats(RepeatedEvents(store))
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.shuffle = shuffle
        self.cost = cost or CostModel()
        self.speeds = check_speeds(num_ranks, speeds if num_ranks > 1 else None)
        self.balance = resolve_strategy(balance, self.sequences.lengths, self.cost, batch_tokens)
        self.plan_ranks, self.plan_window, self.plan_cost = plan_ranks, plan_window, plan_cost or CostModel()
        self.epoch = 0
        self.step = 0
        self._plan: tuple[int, list[Int64Array], PlannedSteps | None] | None = None
        self.plan(0)

    def _skip_repeats(self, repeated: RepeatedEvents) -> None:
        counts = self.sequences.count_targets(repeated)
        self.num_targets_skipped = int(self.sequences.lengths.sum() - counts.sum())
        if self.num_targets_skipped:
            self.sequences, self._num_trained = self.sequences.at(counts > 0), counts[counts > 0]
            self._repeated = repeated

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """Input tokens of one epoch."""
        return int(self.sequences.lengths.sum())

    @property
    def num_targets(self) -> int:
        """Targets of one epoch that count in the loss."""
        return self.num_tokens if self._repeated is None else int(self._num_trained.sum())

    @property
    def num_events_cut(self) -> int:
        """Inputs that are never used because their users are longer than max_len (window="last")."""
        return self.sequences.num_events_cut

    def plan(self, epoch: int) -> list[Int64Array]:
        """Return the sequences of every batch of `epoch`; the last epoch asked for is kept."""
        return self._planned(epoch)[0]

    def _planned(self, epoch: int) -> tuple[list[Int64Array], PlannedSteps | None]:
        cached = self._plan
        if cached is None or cached[0] != epoch:
            self._plan = cached = (epoch, *self._make_plan(epoch))
        return cached[1:]

    def _make_plan(self, epoch: int) -> tuple[list[Int64Array], PlannedSteps | None]:
        lengths = self.sequences.lengths
        if self.plan_ranks is not None:
            assert self.batch_size is not None
            windows = plan_windows(
                lengths,
                batch_size=self.batch_size,
                ranks=self.plan_ranks,
                window=self.plan_window,
                cost=self.plan_cost,
                seed=self.seed,
                epoch=epoch,
            )
            return [windows.step(step)[0] for step in range(len(windows))], windows
        batches = plan_batches(
            lengths,
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
        )
        return batches, None

    @property
    def plan_is_refused(self) -> bool:
        """Whether steps are as without `plan_ranks`, because planned ones would vary more in tokens."""
        windows = self._planned(self.epoch)[1]
        return windows is not None and windows.refused

    def num_batches(self, epoch: int) -> int:
        return len(self.plan(epoch))

    def batch(self, epoch: int, step: int) -> Batch:
        """Read this rank's part of batch `step` of `epoch`."""
        batches, windows = self._planned(epoch)
        return self._read(batches[step], None if windows is None else windows.step(step)[1])

    def _read(self, chosen: Int64Array, planned_parts: Int64Array | None = None) -> Batch:
        if self.num_ranks == 1:
            return training_batch(self.store, self.sequences, chosen, self.columns, self._repeated)
        lengths = self.sequences.lengths[chosen]
        parts = share_step(
            lengths,
            world=self.num_ranks,
            strategy=self.balance,
            cost=self.cost,
            speeds=self.speeds,
            parts=planned_parts,
            num_parts=self.plan_ranks or 1,
        )
        mine = training_batch(self.store, self.sequences, chosen[parts[self.rank]], self.columns, self._repeated)
        return dataclasses.replace(
            mine,
            step_lengths=torch.from_numpy(lengths),
            step_targets=training_targets(self.store, self.sequences, chosen) if self.with_step_targets else None,
            step_num_trained=None if self._repeated is None else int(self._num_trained[chosen].sum()),
        )

    def __iter__(self) -> Generator[Batch, None, None]:
        """Yield the rest of the epoch."""
        epoch = self.epoch
        for step in range(self.step, self.num_batches(epoch)):
            batch = self.batch(epoch, step)
            self.epoch, self.step = epoch, step + 1
            yield batch
        self.epoch, self.step = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next batch; the end of an epoch is the start of the next."""
        return self._position(self.epoch, self.step)

    def position_after(self, epoch: int, step: int) -> dict[str, int]:
        """Return the position behind a batch, as `state_dict` does while that batch is being used."""
        return self._position(epoch, step + 1)

    def _position(self, epoch: int, step: int) -> dict[str, int]:
        return {"epoch": epoch + 1, "step": 0} if step >= self.num_batches(epoch) else {"epoch": epoch, "step": step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position of `state_dict`."""
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
