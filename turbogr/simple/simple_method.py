"""What a simple method is: a name, what it is fitted on, and the settings it is tried with on the validation items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from turbogr.evaluation.baseline_titles import TITLES
from turbogr.evaluation.job_pool import Interrupted
from turbogr.evaluation.scorer import Scorer
from turbogr.simple.training_events import TrainingEvents

Settings = dict[str, float]
Stop = Callable[[], bool]


class LogFacts(NamedTuple):
    """What decides whether a method can be fitted at all, known before any event is read."""

    num_users: int
    num_items: int
    num_events: int


class SimpleMethod(ABC):
    """A method that recommends without a network.

    Settings are plain numbers, so that they can be written into a run folder and the method fitted again to the same
    digits.
    """

    name: ClassVar[str]
    needs_repeats: ClassVar[bool] = False
    """Whether it can recommend nothing but items that the user has had."""

    @property
    def title(self) -> str:
        """Its name in tables."""
        return TITLES[self.name]

    @abstractmethod
    def refusal(self, facts: LogFacts) -> str | None:
        """Return why the method cannot be fitted on such a log, as a sentence, or None."""

    @abstractmethod
    def choices(self, num_items: int) -> Mapping[str, Sequence[float]]:
        """Return the values of every setting that are worth trying; the first is where the search starts."""

    @abstractmethod
    def fit(self, events: TrainingEvents, settings: Mapping[str, Any], should_stop: Stop | None = None) -> Scorer:
        """Fit the method; the same events and settings give the same digits.

        Raises:
            Interrupted: `should_stop` returned True.
        """


def stop_if_asked(should_stop: Stop | None, work: str) -> None:
    """Raise Interrupted if `should_stop` returns True; `work` ends the sentence."""
    if should_stop is not None and should_stop():
        raise Interrupted(f"interrupted while {work}")
