#!/usr/bin/env python3
"""The simulation against formulas worked out by hand, and a short comparison with real runs."""
import json
import os
import subprocess
import sys
import unittest

BENCH = "tools/bench/scaling.py"
sys.path.insert(0, os.path.abspath("tools/bench"))
sys.dont_write_bytecode = True

import scaling  # noqa: E402

NET = {"ranks_per_node": 4, "intra": {"alpha": 1.0, "beta": 0.25}, "inter": {"alpha": 10.0, "beta": 0.5}, "steal": 0.0,
       "tree": False}
WORK = {"parameters": 8, "param_bytes": 1, "grad_bytes": 1, "units": 2, "bucket_bytes": 4, "forward": 100.0,
        "backward": 200.0, "optimizer": 40.0, "jitter": 0.0}
FREE = dict(NET, intra={"alpha": 0.0, "beta": 0.0}, inter={"alpha": 0.0, "beta": 0.0})


def run(*flags):
    return subprocess.run([BENCH, *flags], capture_output=True, text=True)


class ScalingTest(unittest.TestCase):
    def test_transfers(self):
        self.assertEqual(scaling.transfer(NET, "all_reduce", 8, 1, 4), 0)
        # One node: 3 messages of a ring, 3/4 of the bytes.
        self.assertEqual(scaling.transfer(NET, "all_gather", 8, 4, 4), 3 * 1 + 0.75 * 8 * 0.25)
        # All-reduce: twice that, or a tree of 2 levels.
        self.assertEqual(scaling.transfer(NET, "all_reduce", 8, 4, 4), 2 * 2 * 1 + 2 * 0.75 * 8 * 0.25)
        # Two nodes: 7 messages, 2 of which cross the network, whose beta counts.
        self.assertEqual(scaling.transfer(NET, "reduce_scatter", 8, 8, 4), 5 * 1 + 2 * 10 + 7 / 8 * 8 * 0.5)
        tree = dict(NET, tree=True)
        self.assertEqual(scaling.transfer(tree, "reduce_scatter", 8, 8, 4), 2 * 1 + 1 * 10 + 7 / 8 * 8 * 0.5)
        # Four groups of a rank a node each share its network.
        self.assertEqual(scaling.transfer(NET, "all_reduce", 8, 2, 1, sharing=4), 2 * 10 + 2 * 0.5 * 8 * 0.5 * 4)

    def test_free_transfers_leave_computing(self):
        for ranks in (1, 4, 64):
            self.assertAlmostEqual(scaling.predict(FREE, WORK, "ddp", ranks)[0], 340)
            self.assertAlmostEqual(scaling.predict(FREE, WORK, "fsdp", ranks)[0], 300 + 40 / ranks)
            self.assertAlmostEqual(scaling.predict(FREE, WORK, "hybrid", ranks)[0], 300 + 40 / min(ranks, 4))

    def test_what_is_hidden_and_what_is_not(self):
        # Two buckets of 4 bytes, of 4 (tree) + 1.5 each: the first behind backward, the last after it.
        self.assertAlmostEqual(scaling.predict(NET, WORK, "ddp", 4)[0], 300 + 5.5 + 40)
        # The first gather and the last reduce-scatter, of 3 + 0.75 each, are behind nothing.
        self.assertAlmostEqual(scaling.predict(NET, WORK, "fsdp", 4)[0], 300 + 2 * 3.75 + 10)
        # Within one node hybrid sharding is FSDP; across two, its reduce-scatter is followed by an all-reduce of a shard.
        self.assertEqual(scaling.predict(NET, WORK, "hybrid", 4), scaling.predict(NET, WORK, "fsdp", 4))
        shard = 2 * 10 + 2 * 0.5 * 1 * 0.5 * 4
        self.assertAlmostEqual(scaling.predict(NET, WORK, "hybrid", 8)[0], 300 + 2 * 3.75 + shard + 10)
        # A slow network is what a step takes then: two buckets one after the other, from half of backward on.
        slow = dict(NET, intra={"alpha": 0.0, "beta": 100.0})
        self.assertAlmostEqual(scaling.predict(slow, WORK, "ddp", 4)[0], 200 + 2 * 600 + 40)

    def test_crowded_jittery_and_stolen(self):
        self.assertAlmostEqual(scaling.predict(dict(FREE, cores=2), WORK, "ddp", 8)[0], 4 * 340)
        # Four a core: each of two buckets waits for three others, the first behind backward.
        self.assertAlmostEqual(scaling.predict(dict(FREE, cores=2, switch=7.0), WORK, "ddp", 8)[0], 4 * 340 + 3 * 7)
        self.assertAlmostEqual(scaling.transfer(dict(NET, copies={"all_gather": 2}), "all_gather", 8, 4, 4), 3 + 2 * 0.75 * 8 * 0.25)
        self.assertGreater(scaling.predict(FREE, dict(WORK, jitter=0.1), "ddp", 64)[0], 340 * 1.28)
        # 11 of transfers cost the cores that, less than the 5.5 after backward only if none of it is stolen.
        self.assertAlmostEqual(scaling.predict(dict(NET, steal=1.0), WORK, "ddp", 4)[0], 300 + 11 + 40)

    def test_prints_a_row_for_each_case(self):
        done = run()
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [line.split() for line in done.stdout.splitlines()[2:]]
        self.assertEqual([row[0] for row in rows], ["ddp"] * 12 + ["fsdp"] * 12 + ["hybrid"] * 12)
        self.assertEqual([row[1] for row in rows[:12]], [f"{8 << i:,}" for i in range(12)])
        path = os.path.join(os.environ["TEST_TMPDIR"], "work.json")
        with open(path, "w") as f:
            json.dump({"parameters": 1e9, "units": 8}, f)
        done = run("--workload=" + path, "--ranks=4")
        self.assertEqual([line.split()[-1] for line in done.stdout.splitlines()[2:]], ["16.00", "4.00", "4.00"])
        with open(path, "w") as f:
            json.dump({"parametres": 1e9}, f)
        self.assertIn("has no use for parametres", run("--workload=" + path).stderr)

    def test_compares_with_real_runs(self):
        done = run("--check", "--ranks=1,2", "--steps=8", "--rounds=1", "--batch=8")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [line.split() for line in done.stdout.splitlines()[3:]]
        self.assertEqual([row[:2] for row in rows], [["ddp", "1"], ["ddp", "2"], ["fsdp", "1"], ["fsdp", "2"]])
        for row in rows:
            self.assertGreater(float(row[2]), 0)
            self.assertLess(float(row[2]) / float(row[3]), 10)
            self.assertGreater(float(row[2]) / float(row[3]), 0.1)


if __name__ == "__main__":
    unittest.main()
