#!/usr/bin/env python3
"""Brings up clusters, breaks them, and looks for what is left."""
import glob
import os
import signal
import subprocess
import time
import unittest

CLUSTER = os.path.abspath("tools/slurm/local_cluster")


def start(*words, **options):
    return subprocess.Popen([CLUSTER, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **options)


def run(*words):
    process = start(*words)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def processes_of(run_directory):
    """Processes that name the run's directory in their command line or environment."""
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        try:
            with open(path + "/environ", "rb") as environ, open(path + "/cmdline", "rb") as cmdline:
                text = environ.read() + cmdline.read()
        except OSError:
            continue
        if run_directory.encode() in text:
            found.append(path)
    return found


def await_none(run_directory, seconds=10):
    end = time.monotonic() + seconds
    while processes_of(run_directory) and time.monotonic() < end:
        time.sleep(0.05)
    return processes_of(run_directory)


class LocalClusterTest(unittest.TestCase):
    def test_nodes_are_hosts_of_their_own(self):
        status, out, err = run("--nodes", "3", "--", "bash", "-c", """
            echo "$LOCAL_CLUSTER_DIR"
            srun -N3 --ntasks-per-node=2 bash -c 'hostname; touch /tmp/of-$(hostname)' | sort | uniq -c
            srun -N3 --ntasks-per-node=1 bash -c 'ls /tmp | grep of-' | sort""")
        lines = out.split("\n")
        self.assertEqual(status, 0, err)
        self.assertEqual([line.split() for line in lines[1:7]],
                         [["2", "n1"], ["2", "n2"], ["2", "n3"], ["of-n1"], ["of-n2"], ["of-n3"]])
        self.assertFalse(os.path.exists(lines[0]))
        self.assertEqual(processes_of(lines[0]), [])

    def test_counts_the_cpus_and_gpus_that_it_is_told(self):
        # What the course's cluster gives a job: 2 nodes, 4 tasks on each, a GPU and 32 CPUs a task.
        status, out, err = run("--cpus", "128", "--gpus", "4", "--", "bash", "-c", """
            srun -N2 --ntasks-per-node=4 --cpus-per-task=32 --gpus-per-node=4 \\
              bash -c 'echo "$SLURM_CPUS_PER_TASK $SLURM_GPUS_ON_NODE"'""")
        self.assertEqual((status, out), (0, "32 4\n" * 8), err)

    def test_status_is_that_of_the_command(self):
        self.assertEqual(run("--nodes", "1", "--", "bash", "-c", "srun false; exit 7")[0], 7)
        # It may fail to come up too.
        status, out, err = run("--conf", "NoSuchKey=1", "--", "echo", "here")
        self.assertEqual((status, out), (125, ""))
        self.assertIn("NoSuchKey", err)
        self.assertIn("local_cluster: the cluster did not come up\n", err)

    def test_says_what_is_wrong(self):
        for words, message in ((["--nodes", "0", "--", "true"], "--nodes 0: give a number from 1 to 99"),
                               (["--cpus", "many", "--", "true"], "--cpus many: give a number from 1 to 999"),
                               (["--share", "/nowhere", "--", "true"], "--share /nowhere: there is no such directory"),
                               (["--conf", "KillWait", "--", "true"], "--conf KillWait: give KEY=VALUE"),
                               (["--nodes"], "--nodes: no value given"),
                               (["--node", "2", "--", "true"], "unknown option --node"),
                               (["--nodes", "2"], "no command given; usage: local_cluster [OPTIONS] -- CMD ARGS...")):
            self.assertEqual(run(*words), (125, "", "local_cluster: " + message + "\n"))

    def test_a_node_can_be_cut_off_and_killed(self):
        status, out, err = run("--", "bash", "-c", """
            ip link set n2 down; timeout 1 bash -c ': </dev/tcp/n2/6818' 2>/dev/null || echo cut off
            ip link set n2 up; timeout 9 bash -c 'until (: </dev/tcp/n2/6818) 2>/dev/null; do sleep 0.1; done' && echo back
            kill -KILL "$(cat "$LOCAL_CLUSTER_DIR/n2/pid")"; sleep 0.3
            (: </dev/tcp/n2/6818) 2>/dev/null || echo killed""")
        self.assertEqual((status, out), (0, "cut off\nback\nkilled\n"), err)

    def test_runs_side_by_side(self):
        runs = [start("--", "srun", "-N2", "hostname") for _ in range(3)]
        for process in runs:
            out, err = process.communicate(timeout=100)
            self.assertEqual((process.returncode, sorted(out.split())), (0, ["n1", "n2"]), err)

    def interrupt(self, number, expected):
        process = start("--", "bash", "-c", "echo $LOCAL_CLUSTER_DIR; srun -N2 sleep 1000")
        directory = process.stdout.readline().strip()
        self.assertTrue(os.path.isdir(directory))
        time.sleep(0.5)
        process.send_signal(number)
        process.communicate(timeout=20)
        self.assertEqual(process.returncode, expected)
        self.assertEqual(await_none(directory), [])
        return directory

    def test_signals_leave_nothing(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.assertFalse(os.path.exists(self.interrupt(number, 128 + number)))

    def test_kill_9_leaves_a_directory_that_the_next_run_removes(self):
        directory = self.interrupt(signal.SIGKILL, -signal.SIGKILL)
        self.assertTrue(os.path.isdir(directory))
        other = start("--", "bash", "-c", "echo $LOCAL_CLUSTER_DIR; sleep 1000")
        its_own = other.stdout.readline().strip()
        self.assertFalse(os.path.exists(directory))
        self.assertEqual(run("--nodes", "1", "--", "true")[0], 0)
        self.assertTrue(os.path.isdir(its_own))  # it is in use
        other.terminate()
        other.communicate(timeout=20)


if __name__ == "__main__":
    unittest.main()
