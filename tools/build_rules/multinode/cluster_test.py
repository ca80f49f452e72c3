#!/usr/bin/env python3
"""multinode_run on a real Slurm of two nodes: how runs end, and what is left of them."""
import glob
import json
import os
import re
import signal
import subprocess
import time
import unittest

HERE = "tools/build_rules/multinode"
RUN = os.path.abspath(os.path.join(HERE, "test_run"))
FOLDER = os.environ["TEST_TMPDIR"]


class Done:
    def __init__(self, process):
        self.out, self.err = process.communicate(timeout=200)
        self.status = process.returncode

    def hosts(self):
        """The host of each rank, by rank."""
        # Under mpirun, the end of a line may come after the next line.
        lines = [json.loads(line) for line in re.findall(r'{"rank".*?}}', self.out)]
        return [line["host"] for line in sorted(lines, key=lambda line: line["rank"])]


def start(words, salloc=True, **environment):
    with open(FOLDER + "/site.conf", "w") as f:
        f.write("[stage]\ndirectory = %s/stage\n[environment]\nOF_SITE = x\n" % FOLDER)
    prefix = ["salloc", "-Q", "--nodes=2", "--ntasks-per-node=2"] if salloc else []
    return subprocess.Popen(prefix + [RUN, "--site=%s/site.conf" % FOLDER, *words], stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=FOLDER,
                            env=dict(os.environ, RUNFILES_DIR=os.environ["TEST_SRCDIR"], **environment))


def run(*words, **options):
    return Done(start(words, **options))


class ClusterTest(unittest.TestCase):
    def tearDown(self):
        self.assertEqual(os.listdir(FOLDER + "/stage/runs"), [])
        # All hosts' processes are seen from the head.
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(path) as f:
                    self.assertNotIn("test_program", f.read())
            except OSError:
                pass
        self.assertEqual(glob.glob(os.environ["LOCAL_CLUSTER_DIR"] + "/n*/tmp/test_run*"), [])

    def wait_for(self, process, text, times):
        out = ""
        while out.count(text) < times:
            line = process.stdout.readline()
            if not line:
                self.fail("it ended early:\n" + out + process.stderr.read())
            out += line

    def test_an_allocation_by_srun_and_mpirun(self):
        for launcher in ("auto", "mpirun"):
            done = run("--launcher=" + launcher, "it's", 'a "b"')
            self.assertEqual((done.status, done.hosts()), (0, ["n1", "n1", "n2", "n2"]), done.err)
            self.assertEqual(done.out.count(json.dumps(["--of=rule", "it's", 'a "b"'])), 4)
        self.assertIn("by srun --mpi=pmix", run().err)

    def test_a_batch_job(self):
        done = run("--submit", "--time=5", salloc=False)
        self.assertEqual((done.status, done.hosts()), (0, ["n1", "n1", "n2", "n2"]), done.err)
        done = run("--submit", "--launcher=mpirun", salloc=False)
        self.assertEqual((done.status, done.hosts()), (0, ["n1", "n1", "n2", "n2"]), done.err)

    def test_a_rank_that_fails_or_is_killed_is_named(self):
        done = run("--do=fail_on_1")
        self.assertEqual(done.status, 3, done.err)
        self.assertIn("multinode_run: rank 1 on n1 ended with status 3\n", done.err)
        done = run("--submit", "--do=fail_on_1", salloc=False)
        self.assertEqual(done.status, 3, done.err)
        self.assertIn("multinode_run: rank 1 on n1 ended with status 3\n", done.out)
        done = run("--do=kill_1")
        self.assertEqual(done.status, 137, done.err)
        self.assertIn("never heard how rank 1 ended", done.err)

    def test_restarts(self):
        for words, salloc in ((["--submit"], False), ([], True)):
            done = run("--do=two_restarts", "--max_restarts=2", *words, salloc=salloc)
            self.assertEqual(done.status, 0, done.err)
            # The ranks of earlier times may have been ended before they said anything.
            self.assertEqual(done.out.count('"LOCKSTEP_RESTARTS": "2"'), 4, done.out)

    def test_ctrl_c_lets_all_ranks_save(self):
        # salloc stays outside: Ctrl-C is for what runs in it.
        allocation = subprocess.Popen(["salloc", "-Q", "--nodes=2", "--ntasks-per-node=2", "bash", "-c",
                                       "env | grep ^SLURM; echo; read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines = list(iter(allocation.stdout.readline, "\n"))
        slurm = dict(line.rstrip("\n").split("=", 1) for line in lines)
        for launcher in ("srun", "mpirun"):
            process = start(["--do=wait_to_save", "--launcher=" + launcher], salloc=False, **slurm)
            self.wait_for(process, "waiting", 4)
            process.send_signal(signal.SIGINT)
            done = Done(process)
            self.assertEqual((done.status, len(re.findall(r"rank \d saved", done.out))), (130, 4), done.err)
            self.assertIn("saved and stopped; start it again to go on", done.err)
        process = start(["--do=wait"], salloc=False, **slurm)
        self.wait_for(process, "waiting", 4)
        process.send_signal(signal.SIGINT)
        self.assertEqual(Done(process).status, 130)
        allocation.communicate("\n")

    def test_an_interrupted_batch_job_is_cancelled_and_saves(self):
        process = start(["--submit", "--do=wait_to_save"], salloc=False)
        self.wait_for(process, "waiting", 4)
        process.send_signal(signal.SIGINT)
        done = Done(process)
        self.assertEqual((done.status, len(re.findall(r"rank \d saved", done.out))), (130, 4), done.err + done.out)
        self.assertIn("is cancelled", done.err)
        self.assertEqual(subprocess.run(["squeue", "-h"], stdout=subprocess.PIPE, check=True).stdout, b"")

    def stop_a_job(self, launcher, *words):
        process = start(["--detach", "--do=wait_to_save", "--max_restarts=1", "--launcher=" + launcher], salloc=False)
        job = Done(process).out.strip()
        output = "%s/test_run-%s.out" % (FOLDER, job)

        def printed():
            if not os.path.exists(output):
                return ""
            with open(output) as f:
                return f.read()

        end = time.monotonic() + 60
        while printed().count("waiting") < 4:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.2)
        subprocess.run(["scancel", *words, job], check=True)
        state = ""
        while not re.search("JobState=PENDING .* Restarts=1 ", state):
            self.assertLess(time.monotonic(), end, state)
            time.sleep(0.2)
            state = subprocess.run(["scontrol", "-o", "show", "job", job], stdout=subprocess.PIPE, text=True).stdout
        subprocess.run(["scancel", job], check=True)
        text = printed()
        self.assertEqual(len(re.findall(r"rank \d saved", text)), 4, text)
        self.assertIn("saved and stopped by Slurm: goes back into the queue", text)

    def test_a_job_stopped_by_its_time_limit_goes_back_into_the_queue(self):
        # What a time limit does: SIGTERM to the ranks, not to the batch script; or SIGUSR1 to that alone.
        self.stop_a_job("srun", "--signal=TERM")
        self.stop_a_job("mpirun", "--signal=USR1", "--batch")

    def test_z_a_node_that_dies_is_no_success(self):
        # Last, as the node does not come back. srun returns 0 here.
        process = start(["--do=wait"])
        self.wait_for(process, "waiting", 4)
        with open(os.environ["LOCAL_CLUSTER_DIR"] + "/n2/pid") as f:
            os.kill(int(f.read()), signal.SIGKILL)
        done = Done(process)
        self.assertNotEqual(done.status, 0)
        self.assertIn("multinode_run: never heard how ranks 2 3 ended: killed, or the node lost", done.err)


if __name__ == "__main__":
    if "LOCAL_CLUSTER_DIR" not in os.environ:
        sources = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../..")  # which may be in /tmp
        os.execv("tools/slurm/local_cluster", ["local_cluster", "--share", FOLDER, "--share", sources, "--conf", "KillWait=20", "--conf",
                                               "SlurmdTimeout=10", "--", "python3", __file__])
    unittest.main()
