#!/usr/bin/env python3
"""The tutorials for many nodes, on a Slurm of this machine's own: 2 nodes with 2 ranks each."""
import os
import re
import subprocess
import unittest

FOLDER = os.environ["TEST_TMPDIR"]


def run(target, *words, salloc=True):
    path = os.path.abspath("tutorials/" + target)
    prefix = ["salloc", "-Q", "--nodes=2", "--ntasks-per-node=2"] if salloc else []
    return subprocess.run(prefix + [path, "--site=%s/site.conf" % FOLDER, *words], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=FOLDER,
                          env=dict(os.environ, RUNFILES_DIR=os.environ["TEST_SRCDIR"]))


class MultinodeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(FOLDER + "/site.conf", "w") as f:
            f.write("[stage]\ndirectory = %s/stage\n" % FOLDER)

    def epochs(self, done):
        """What a training printed of its epochs, but for times."""
        lines = re.findall(r"(epoch \d+: .*) steps in ", done.stdout)
        self.assertTrue(lines, done.stdout)
        return lines

    def test_06_torch_dist_multi_node(self):
        for words, salloc in ((["--launcher=srun"], True), (["--launcher=mpirun"], True), (["--submit"], False)):
            done = run("06_torch_dist_multi_node/torch_dist_multi_node", "--kib=1000", "--times=2", *words, salloc=salloc)
            self.assertEqual(done.returncode, 0, done.stderr)
            text = re.sub(r"\d+\.\d{3} ms", "... ms", done.stdout)
            self.assertEqual(text, "rank 0 of 4 is on n1\nrank 1 of 4 is on n1\nrank 2 of 4 is on n2\nrank 3 of 4 is on n2\n"
                             "sum over all ranks: 10\nsum over the ranks on n1: 3\n"
                             "all-reduce of 1000 KiB: ... ms inside a node, ... ms across 2 nodes\n")

    def test_07_mnist_ddp_multinode(self):
        target = "07_mnist_ddp_multinode/mnist_ddp_multinode"
        words = ["--model=mlp", "--epochs=1", "--steps=8", "--batch=16"]
        whole = run(target, *words)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        result = r"test loss \d\.\d+, test accuracy (\d+)\.\d\d %"
        self.assertGreater(int(re.search(result, whole.stdout).group(1)), 30, whole.stdout)  # 10 without learning

        # Stopped after each step, started again in the same job, and then by the user: to the same end.
        words += ["--checkpoint_dir=%s/checkpoints" % FOLDER]
        done = run(target, "--max_restarts=1", *words, "--", "--time_limit=1ms")
        self.assertEqual(done.returncode, 75, done.stderr)
        self.assertEqual(done.stdout, "going on after step 1\n")
        self.assertIn("multinode_run: saved and stopped: restart 1 of 1\n", done.stderr)
        done = run(target, *words)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("going on after step 2\n", done.stdout)
        self.assertEqual(self.epochs(done), self.epochs(whole))

        done = run(target, "--data=/nowhere", "--log_ranks=0", *words)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("mnist_ddp: rank 0: mnist: no train-images-idx3-ubyte", done.stderr)
        self.assertRegex(done.stderr, r"multinode_run: rank \d on n\d ended with status 1\n")

    def test_08_mnist_ddp_multinode_streaming(self):
        for split in (["--output=train.h5"], ["--output=test.h5", "--test_split"]):
            subprocess.run([os.path.abspath("tutorials/08_mnist_ddp_multinode_streaming/create_mnist_h5"), "--gzip=1", *split],
                           cwd=FOLDER, stdout=subprocess.PIPE, check=True)
        target = "08_mnist_ddp_multinode_streaming/mnist_ddp_multinode_streaming"
        done = run(target, "--submit", "--train_file=train.h5", "--test_file=test.h5", "--model=mlp", "--epochs=1", "--steps=30",
                   "--batch=32", "--budget_mib=4", salloc=False)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertGreater(int(re.search(r"test accuracy (\d+)\.", done.stdout).group(1)), 30, done.stdout)
        peak = re.search(r"of chunks, never more than (\S+) MiB", done.stdout).group(1)
        self.assertLessEqual(float(peak), 4)

        # Stopped after a step, and started again by the user: to the same end.
        words = ["--train_file=train.h5", "--test_file=test.h5", "--model=mlp", "--epochs=1", "--steps=8", "--batch=32",
                 "--budget_mib=4"]
        whole = run(target, *words)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        words += ["--checkpoint_dir=%s/streaming" % FOLDER]
        done = run(target, *words, "--", "--time_limit=1ms")
        self.assertEqual(done.returncode, 75, done.stderr)
        done = run(target, *words)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("going on after step 1\n", done.stdout)
        self.assertEqual(self.epochs(done), self.epochs(whole))

        done = run(target)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("name the files to learn from and to be tested with", done.stderr)


if __name__ == "__main__":
    if "LOCAL_CLUSTER_DIR" not in os.environ:
        sources = os.path.join(os.path.dirname(os.path.realpath(__file__)), "..")  # which may be in /tmp
        os.execv("tools/slurm/local_cluster", ["local_cluster", "--share", FOLDER, "--share", sources, "--", "python3", __file__])
    unittest.main()
