#!/usr/bin/env python3
"""Faults at random steps of random ranks, on a Slurm of this machine's own: 2 nodes with 2 ranks each.

Each run must end in time, with a status that is not 0, with an error that names the rank at fault, with what each rank
was last doing in the logs, and with no process or directory left. LOCKSTEP_SOAK: 50 runs in the place of 5.
"""
import glob
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import unittest

FOLDER = os.environ["TEST_TMPDIR"]
DEADLINE = 4  # of an operation
SECONDS_TO_END = 60  # all of a run; without a network, Slurm and mpirun take their time
FAULTS = ("kill", "stop", "throw", "memory", "mismatch", "network")


def named(fault, rank):
    """What the output must say, as a regular expression."""
    lost = "[23]"  # all ranks of the second node, whose link is cut
    return {
        "kill": r"multinode_run: rank %d on n\d ended with status 137 \(SIGKILL\)" % rank,
        "stop": r"(waiting for rank %d \(|rank %d, which serves the store, gives no sign of life)" % (rank, rank),
        "throw": r"fault_program: rank %d: injected at step \d+\n" % rank,
        "memory": r"fault_program: rank %d: .*(memory|alloc)" % rank,
        "mismatch": r"issued different operations as #\d+: .*\brank %d: Broadcast" % rank,
        "network": r"fault_program: rank [01]: .*(waiting for ranks? %s|ranks? .*%s.*no sign of life|cannot reach)" % (lost, lost),
    }[fault]


class FaultsTest(unittest.TestCase):
    def start(self, fault, rank, step, launcher, logs):
        with open(FOLDER + "/site.conf", "w") as f:
            f.write("[stage]\ndirectory = %s/stage\n[environment]\nLOCKSTEP_END_SECONDS = 12\nLOCKSTEP_COMM_DEBUG = %s\n" %
                    (FOLDER, "detail" if fault == "mismatch" else "off"))
        words = ["salloc", "-Q", "--nodes=2", "--ntasks-per-node=2", os.path.abspath("tutorials/faults/faults"),
                 "--site=%s/site.conf" % FOLDER, "--launcher=" + launcher, "--log_ranks=all", "--log_dir=" + logs,
                 "--deadline=%ds" % DEADLINE, "--fault=" + fault, "--fault_rank=%d" % rank, "--fault_step=%d" % step]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                start_new_session=True, cwd=FOLDER, env=dict(os.environ, RUNFILES_DIR=os.environ["TEST_SRCDIR"]))

    def cut_when_asked(self, process):
        while not glob.glob(FOLDER + "/stage/runs/*/cut"):
            self.assertIsNone(process.poll(), "it ended before its fault")
            time.sleep(0.005)
        subprocess.run(["ip", "link", "set", "n2", "down"], check=True)

    def check_nothing_left(self):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            left = os.listdir(FOLDER + "/stage/runs")
            for path in glob.glob("/proc/[0-9]*/cmdline"):  # all hosts' processes are seen from the head
                try:
                    with open(path) as f:
                        left += [path] if "fault_program" in f.read() else []
                except OSError:
                    pass
            if not left:
                return
            time.sleep(0.2)
        self.fail("left behind: %s" % left)

    def one(self, fault, rank, step, launcher):
        logs = "%s/logs-%d" % (FOLDER, time.monotonic_ns())
        start = time.monotonic()
        process = self.start(fault, rank, step, launcher, logs)
        try:
            if fault == "network":
                self.cut_when_asked(process)
            out, _ = process.communicate(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail("no end after %d s:\n%s" % (SECONDS_TO_END, process.communicate()[0]))
        finally:
            if fault == "network":
                subprocess.run(["ip", "link", "set", "n2", "up"], check=True)
        took = time.monotonic() - start
        print("%-8s rank %d step %3d %-6s: %4.1f s, status %d" % (fault, rank, step, launcher, took, process.returncode),
              file=sys.stderr, flush=True)
        self.assertNotEqual(process.returncode, 0, out)
        self.assertRegex(out, re.compile(named(fault, rank)))
        self.check_flights(fault, rank, step, logs, out)
        self.check_nothing_left()

    def check_flights(self, fault, rank, step, logs, out):
        """Of a rank that waited in vain, the last operation is the one that it waited for."""
        flights = glob.glob(logs + "/rank*.flight.json")
        if fault in ("stop", "network", "throw", "memory", "mismatch"):
            self.assertTrue(flights, out)
        for path in flights:
            with open(path) as f:
                entries = json.load(f)["entries"]
            self.assertIn(entries[-1]["state"], ("started", "failed", "issued", "completed"))
            if fault in ("stop", "throw", "memory"):
                self.assertIn(entries[-1]["sequence"] - step, (-1, 0, 1, 2), path)

    def test_faults(self):
        runs = int(os.environ.get("LOCKSTEP_FAULT_RUNS", 50 if os.environ.get("LOCKSTEP_SOAK") else 5))
        seed = int(os.environ.get("LOCKSTEP_SEED", random.randrange(10**9)))
        print("LOCKSTEP_SEED=%d" % seed, file=sys.stderr)
        rng = random.Random(seed)
        faults = []
        while len(faults) < runs:
            faults += rng.sample(FAULTS, len(FAULTS))  # each, before one comes again
        for fault in faults[:runs]:
            rank, step = rng.randrange(4), rng.randrange(300)
            launcher = rng.choice(("srun", "mpirun"))
            with self.subTest(fault=fault, rank=rank, step=step, launcher=launcher):
                self.one(fault, rank, step, launcher)


if __name__ == "__main__":
    if "LOCAL_CLUSTER_DIR" not in os.environ:
        sources = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../..")  # which may be in /tmp
        os.execv("tools/slurm/local_cluster", ["local_cluster", "--share", FOLDER, "--share", sources, "--conf", "KillWait=5", "--",
                                               "python3", __file__])
    unittest.main()
