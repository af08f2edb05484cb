"""The sum over all jobs: as many faults of each kind as were asked for, what was lost, and the record of it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turbogr import __version__
from turbogr.chaos.fault_plan import KINDS, JobPlan, count_kinds, plan_job
from turbogr.chaos.job_lives import HANG_SECONDS, JobUnderFaults, log_of, start_life
from turbogr.chaos.rank_task import Board, start_preparing
from turbogr.chaos.surroundings import Disk, Link
from turbogr.chaos.verdict import compare
from turbogr.errors import UserError
from turbogr.files import replace_text

_DISK_BYTES = 12 << 20
_NUM_USERS = 240
_MOST_FRUITLESS_JOBS = 5  # in a row, in which no fault has struck


@dataclass(frozen=True)
class Options:
    """How many faults of which kinds, on jobs of how many ranks and steps."""

    faults: int = 100
    seed: int = 0
    kinds: tuple[str, ...] = tuple(KINDS)
    ranks: tuple[int, ...] = (2, 2, 2, 3, 4)
    steps: int = 75

    def wanted(self) -> Counter[str]:
        """Return how many faults of each kind: equally many, one more of the first kinds where they do not divide."""
        share, more = divmod(self.faults, len(self.kinds))
        return Counter({kind: share + (number < more) for number, kind in enumerate(self.kinds)})


def run_chaos(options: Options, journal: Path | None = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run jobs under faults until all that are wanted have struck; return the record.

    The results of jobs that are done are kept in `journal`, and the same call goes on after an interruption. Where a
    job is not as it must be, its logs stay, and the record says where.

    Raises:
        UserError: the journal is of other options, or no fault strikes.
    """
    kept = _Kept(journal, options)
    fruitless = 0
    with ExitStack() as opened:
        workshop = _Workshop(opened)
        while missing := options.wanted() - count_kinds(kept.struck()):
            number = len(kept.jobs)
            plan = plan_job(options.seed, number, missing, ranks=options.ranks, num_steps=options.steps)
            job = workshop.run_job(plan)
            kept.add(job, workshop.machine)
            fruitless = 0 if job["struck"] else fruitless + 1
            if fruitless > _MOST_FRUITLESS_JOBS:
                raise UserError(f"in {fruitless} jobs no fault has struck; the last one: {job['problems']}")
            say(_describe(job, len(kept.struck()), options))
    return _record(options, kept)


class _Kept:
    """The jobs that are done, also in a file, and the facts of the machine."""

    def __init__(self, path: Path | None, options: Options) -> None:
        self._path = path
        self._identity = json.loads(json.dumps({"turbogr": __version__, **asdict(options)}))
        self.jobs: list[dict[str, Any]] = []
        self.machine: dict[str, Any] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            identity, self.jobs, self.machine = content["identity"], list(content["jobs"]), dict(content["machine"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} holds no interrupted chaos ({error}); remove it or name another --json") from None
        if identity != self._identity:
            raise UserError(
                f"{path} has {len(self.jobs)} jobs of an interrupted command with other options ({identity}); go on "
                "with those, remove the file, or name another --json"
            )

    def add(self, job: dict[str, Any], machine: dict[str, Any]) -> None:
        self.jobs.append(job)
        self.machine = machine
        if self._path is not None:
            content = {"identity": self._identity, "machine": machine, "jobs": self.jobs}
            replace_text(self._path, json.dumps(content) + "\n")

    def struck(self) -> list[dict[str, Any]]:
        return [fault for job in self.jobs for fault in job["struck"]]


class _Workshop:
    """Folders, disk, link and data of all jobs; made when the first job is run."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._ready = False
        self.machine: dict[str, Any] = {}

    def _prepare(self) -> None:
        self._ready = True
        self.folder = Path(tempfile.mkdtemp(prefix="turbogr-chaos-"))
        self._keep = False
        self._opened.callback(self._remove)
        self.disk = Disk(self.folder / "disk", _DISK_BYTES)
        self._opened.callback(self.disk.close)
        self.link = Link()
        self.data = self.folder / "data"
        process = start_preparing(self.data, _NUM_USERS, self.folder / "prepare.txt", self.folder / "machine.json")
        process.join()
        if process.exitcode:
            raise UserError(f"no data could be prepared: {(self.folder / 'prepare.txt').read_text()}")
        self.machine = json.loads((self.folder / "machine.json").read_text(encoding="utf-8"))

    def run_job(self, plan: JobPlan) -> dict[str, Any]:
        """Run a job under its faults and undisturbed; return what became of it."""
        if not self._ready:
            self._prepare()
        folder = self.folder / f"job-{plan.number}"
        folder.mkdir()
        job = JobUnderFaults(plan, folder, self.disk, self.link, self.data)
        result = job.live()
        undisturbed = self.disk.folder / f"undisturbed-{plan.number}"
        problems, different, wrong = list(result.problems), [], 0
        if not problems:
            problems += self._run_undisturbed(plan, folder, undisturbed)
        struck = list(result.struck)
        if not problems:
            verdict = compare(plan, job.run, undisturbed, folder)
            different, wrong = verdict.different, verdict.wrong_samples
            struck += [{"kind": "nan", "job": plan.number, "step": step} for step in plan.bad_steps]
            if verdict.skipped_steps != plan.bad_steps:
                problems.append(f"steps {verdict.skipped_steps} were left out, not {plan.bad_steps}")
            if verdict.different_metrics:
                problems.append("validations of the undisturbed job gave other figures")
            problems += [f"{name} differs from that of the undisturbed job" for name in different]
            problems += [f"{wrong} samples were skipped or repeated"] if wrong else []
        if problems:
            self._keep_logs(plan, job.run, undisturbed, folder)
        else:
            shutil.rmtree(folder)
        for run in (job.run, undisturbed):
            shutil.rmtree(run, ignore_errors=True)
        return {
            "job": plan.number,
            "ranks": plan.ranks,
            "settings": {key: plan.settings[key] for key in _SHOWN},
            "lives": result.lives,
            "from_survivors": result.from_survivors,
            "struck": struck,
            "lost_steps": result.lost_checkpoint_steps + wrong,
            "different_weights": bool(different),
            "hangs": result.hangs,
            "problems": problems,
            "logs": str(folder) if problems else None,
        }

    def _run_undisturbed(self, plan: JobPlan, folder: Path, run: Path) -> list[str]:
        """Run the job without faults and without the updates of its bad steps; return problems."""
        Board(str(folder / "board"), plan.ranks, new=True)
        processes = start_life(plan, folder, run, self.data, 0, left_out=tuple(plan.bad_steps))
        try:
            for process in processes:
                process.join(HANG_SECONDS)
        finally:
            for process in processes:
                process.kill()
        statuses = [process.exitcode for process in processes]
        if not any(statuses):
            return []
        words = [log_of(folder, 0, rank).read_text()[-300:] for rank in range(plan.ranks)]
        return [f"the undisturbed job ended with {statuses}: {words}"]

    def _keep_logs(self, plan: JobPlan, run: Path, undisturbed: Path, folder: Path) -> None:
        self._keep = True
        for source, name in ((run, "run"), (undisturbed, "undisturbed")):
            if source.exists():
                shutil.copytree(source, folder / name, dirs_exist_ok=True)

    def _remove(self) -> None:
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)


_SHOWN = (
    "pipeline.mode",
    "parallel.groups",
    "parallel.members",
    "parallel.balance",
    "optimizer.table",
    "train.checkpoint_every",
    "train.background_save",
    "train.on_bad_step",
)


def _describe(job: dict[str, Any], num_struck: int, options: Options) -> str:
    """Return a line about a job that is done."""
    kinds = count_kinds(job["struck"])
    met = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no fault"
    verdict = "the same weights, nothing lost" if not job["problems"] else "; ".join(job["problems"])
    return f"{num_struck} of {options.faults} faults; job {job['job']} ({job['ranks']} ranks, {met}): {verdict}"


def _record(options: Options, kept: _Kept) -> dict[str, Any]:
    jobs, struck = kept.jobs, kept.struck()
    return {
        "turbogr": __version__,
        "machine": kept.machine,
        "seed": options.seed,
        "faults": len(struck),
        "by_kind": dict(sorted(count_kinds(struck).items())),
        "by_moment": dict(sorted(Counter(fault.get("while", "in a step") for fault in struck).items())),
        "lost_steps": sum(job["lost_steps"] for job in jobs),
        "different_weights": sum(job["different_weights"] for job in jobs),
        "hangs": sum(job["hangs"] for job in jobs),
        "problems": [f"job {job['job']}: {problem} ({job['logs']})" for job in jobs for problem in job["problems"]],
        "num_jobs": len(jobs),
        "num_lives": sum(job["lives"] for job in jobs),
        "lives_from_survivors": sum(job["from_survivors"] for job in jobs),
        "steps_per_job": options.steps,
        "jobs": list(jobs),
    }
