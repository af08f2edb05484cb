from __future__ import annotations

import threading
import time

import pytest
import torch

from turbogr.evaluation.job_pool import Interrupted, Step, run_jobs


def test_results_come_in_order_and_progress_adds_up() -> None:
    def work(job: int, step: Step) -> int:
        time.sleep(0.01 if job % 3 == 0 else 0)
        step(job)
        return job * job

    reported: list[int] = []
    results = list(run_jobs(work, range(20), num_workers=3, progress=reported.append))
    assert results == [job * job for job in range(20)]
    assert sum(reported) == sum(range(20))


def test_each_worker_computes_alone_and_the_caller_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        # A product that some builds of PyTorch round differently on 8 threads.
        left, right = torch.randn(100, 24), torch.randn(24, 24)
        torch.set_num_threads(1)
        wanted = left @ right
        torch.set_num_threads(8)
        found = list(run_jobs(lambda job, step: (left @ right, torch.is_grad_enabled()), range(12), num_workers=3))
        assert all(torch.equal(product, wanted) for product, _ in found)
        assert not any(gradients for _, gradients in found)
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)


def test_stopping_ends_jobs_under_way() -> None:
    started = threading.Event()
    ended: list[int] = []

    def work(job: int, step: Step) -> None:
        started.set()
        try:
            while True:
                step(1)
                time.sleep(0.001)
        finally:
            ended.append(job)

    with pytest.raises(Interrupted):
        list(run_jobs(work, range(10), num_workers=2, should_stop=started.is_set))
    assert 1 <= len(ended) <= 2


def test_jobs_are_read_only_a_little_ahead_and_leaving_early_is_clean() -> None:
    read: list[int] = []

    def jobs() -> object:
        for job in range(1000):
            read.append(job)
            yield job

    threads = threading.active_count()
    results = run_jobs(lambda job, step: job, jobs(), num_workers=2)  # type: ignore[arg-type, var-annotated]
    assert [next(results), next(results)] == [0, 1]
    results.close()  # type: ignore[attr-defined]
    assert len(read) <= 6
    assert threading.active_count() == threads


def test_an_error_of_a_job_reaches_the_caller() -> None:
    def work(job: int, step: Step) -> int:
        return 1 // (job - 5)

    with pytest.raises(ZeroDivisionError):
        list(run_jobs(work, range(10), num_workers=2))
    assert list(run_jobs(work, [], num_workers=2)) == []
