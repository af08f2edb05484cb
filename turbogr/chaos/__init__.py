"""Random faults against real training jobs: kills, stops, full disks, slow links and values that are not finite.

`run_chaos` starts jobs of a few ranks, meets them with faults at random moments, resumes every life until the job is
done, and compares what is left with the same job undisturbed.

    fault_plan.py           which faults meet which job, and when: a function of the seed
    surroundings.py         a disk of a few megabytes and a link that can be slowed, for this process alone
    bad_values.py           losses and gradients that are not finite, put into chosen steps
    rank_task.py            what a rank is asked for, and how ranks show how far they are
    rank_under_faults.py    what a rank of such a job does: it trains, and shows how far it is
    job_lives.py            one job: its lives, the faults that meet them, what was lost
    verdict.py              the comparison with the undisturbed job
    chaos_record.py         the sum over all jobs
"""
