"""How the stages of different batches overlap: one executor per mode.

A batch passes six stages: load (read it, draw what its loss needs), exchange (find its distinct ids and start to send
them to the owners of the rows), wait (until the owners have them), embed (the rows are sent to the ranks that requested
them), dense (forward and backward) and update (gradients are sent to the owners of the rows, all weights change). The
executors differ in what may run early:

    serial.py           nothing but loading: the definition of `sync`
    pipelined.py        load, exchange and wait of later batches; rows are read after every earlier update (`sync`)
    semi_async.py       rows of batch t are read when exactly the updates before batch t - staleness are done, and rows
                        are updated while the next batches compute
    exact_overlap.py    rows are read one batch ahead, except those that two consecutive batches share: they are read
                        after their update

The order of reads and updates is deterministic; timing cannot change it. An executor whose workers have no threads
gives the same weights.
"""

from __future__ import annotations

from turbogr.config import PipelineConfig
from turbogr.training.pipeline.exact_overlap import ExactOverlap
from turbogr.training.pipeline.executor import Executor
from turbogr.training.pipeline.pipelined import Pipelined
from turbogr.training.pipeline.semi_async import SemiAsync
from turbogr.training.pipeline.serial import Serial
from turbogr.training.pipeline.workers import MakeWorker, make_worker
from turbogr.training.step import Stepper
from turbogr.training.timeline import Timeline


def make_executor(
    stepper: Stepper, config: PipelineConfig, timeline: Timeline, make_worker: MakeWorker = make_worker
) -> Executor:
    """Build the executor that a config names; all ranks call it together."""
    depth = config.depth_on(stepper.mesh.world.size)
    if config.mode == "semi_async":
        return SemiAsync(stepper, timeline, depth, config.staleness, make_worker)
    if config.mode == "exact_overlap":
        return ExactOverlap(stepper, timeline, depth, make_worker)
    if depth == 1:
        return Serial(stepper, timeline, make_worker)
    return Pipelined(stepper, timeline, depth, make_worker)
