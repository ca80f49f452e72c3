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

    def test_06_torch_dist_multi_node(self):
        for words, salloc in ((["--launcher=srun"], True), (["--launcher=mpirun"], True), (["--submit"], False)):
            done = run("06_torch_dist_multi_node/torch_dist_multi_node", "--kib=1000", "--times=2", *words, salloc=salloc)
            self.assertEqual(done.returncode, 0, done.stderr)
            text = re.sub(r"\d+\.\d\d ms", "... ms", done.stdout)
            self.assertEqual(text, "rank 0 of 4 is on n1\nrank 1 of 4 is on n1\nrank 2 of 4 is on n2\nrank 3 of 4 is on n2\n"
                             "sum over all ranks: 10\nsum over the ranks on n1: 3\n"
                             "all-reduce of 1000 KiB: ... ms inside a node, ... ms across 2 nodes\n")


if __name__ == "__main__":
    if "LOCAL_CLUSTER_DIR" not in os.environ:
        os.execv("tools/slurm/local_cluster", ["local_cluster", "--share", FOLDER, "--", "python3", __file__])
    unittest.main()
