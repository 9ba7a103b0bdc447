"""A task of a step that asks the controller about its job, and does what it is told to, as an agent would."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import asdict

from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.agent.slurm.requeue import requeue
from elastic_agent.config.settings import Settings


def main() -> None:
    job = SlurmJob.from_environment(os.environ)
    assert job is not None
    print(f"job {job.id} in life {job.requeues}", flush=True)
    for word in sys.argv[1:]:
        match word:
            case "end":
                print(asdict(asyncio.run(job.end())), flush=True)
            case "requeue":
                signal.signal(
                    signal.SIGTERM, signal.SIG_IGN
                )  # what the controller answers to this is asked for
                print(asyncio.run(requeue(Settings(requeue="auto"), job)), flush=True)
            case "notice":
                signal.sigwait({signal.SIGUSR1})
                print("told", flush=True)
            case "wait-unless-named-like-the-array":
                if os.environ["SLURM_JOB_ID"] != os.environ["SLURM_ARRAY_JOB_ID"]:
                    signal.pause()
            case "first-life":
                if job.requeues:
                    return


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    main()
