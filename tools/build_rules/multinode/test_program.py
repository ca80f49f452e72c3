#!/usr/bin/env python3
"""What the tests of multinode_run run: test_program.py [--do=WHAT] [ARGUMENT...]

Prints its rank, its arguments and what it was given, then does WHAT.
"""
import json
import os
import signal
import sys
import time

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_PROCID", "0")))
do = [word[5:] for word in sys.argv[1:] if word.startswith("--do=")]
names = ("LOCKSTEP_RESTARTS", "OMP_NUM_THREADS", "SLURM_PMIX_FENCE", "OF_SITE")
print(json.dumps({"rank": rank, "host": os.uname().nodename, "args": sys.argv[1:], "cwd": os.getcwd(),
                  "env": {name: os.environ[name] for name in names if name in os.environ}}), flush=True)


def save(number, _):
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_DFL)  # as of parallel/checkpoint: a second one is no joke
    time.sleep(1)
    print("rank %d saved" % rank, flush=True)
    sys.exit(75)


for what in do:
    if what == "fail_on_1" and rank == 1:
        sys.exit(3)
    if what == "three_on_1" and rank == 1:
        sys.exit(3)
    if what == "abort_on_1" and rank == 1:
        os.abort()
    if what == "two_restarts" and int(os.environ["LOCKSTEP_RESTARTS"]) < 2:
        sys.exit(75)
    if what == "kill_1" and rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)  # rank.sh, and so no word of this rank
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stderr":
        print("to stderr", file=sys.stderr)
    if what == "wait_to_save":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, save)
    if what in ("wait", "wait_to_save", "fail_on_1", "kill_1"):
        print("waiting", flush=True)
        time.sleep(60)
