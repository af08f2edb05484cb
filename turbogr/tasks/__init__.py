"""Tasks: what a run learns, and how it is measured. `retrieval` is the first."""

from __future__ import annotations

from turbogr import plugins
from turbogr.config import Config
from turbogr.tasks.task import DataFacts, Task


def task_class(name: str) -> type[Task]:
    """Return the task of this name, built in or from a plug-in.

    Raises:
        UserError: no such task.
    """
    found: type[Task] = plugins.find("task", name).factory
    return found


def make_task(config: Config, data: DataFacts) -> Task:
    """Build the task that a config names; the config must be resolved."""
    if config.method is not None:
        from turbogr.tasks.method_task import MethodTask

        return MethodTask(config)
    task: Task = plugins.find("task", config.task).factory(config, data)
    return task
