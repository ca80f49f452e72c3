#!/usr/bin/env python3
"""Runs the benchmark's own side on a tiny model."""
import json
import os
import statistics
import subprocess
import unittest

BENCH = "tools/bench/checkpoints.py"


def run(*flags):
    return subprocess.run([BENCH, *flags], capture_output=True, text=True)


class CheckpointsTest(unittest.TestCase):
    def test_figures_agree(self):
        folder = os.environ["TEST_TMPDIR"]
        path = os.path.join(folder, "checkpoints.json")
        done = run("--contestants=ours", "--ranks=2", "--rounds=2", "--samples=2", "--layers=1",
                   f"--folder={folder}", f"--json={path}")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(path) as f:
            report = json.load(f)
        self.assertEqual(report["bytes"], 12 << 20)
        times = {entry["what"]: entry["seconds"] for entry in report["times"]}
        self.assertEqual(set(times), {"write", "save", "stall", "copy", "read", "load", "read, cold", "load, cold"})
        for what, seconds in times.items():
            self.assertEqual(len(seconds), 4)
            self.assertGreater(min(seconds), 0, what)
        row = next(line.split() for line in done.stdout.splitlines() if line.startswith("save"))
        self.assertEqual(row[1], f"{statistics.median(times['save']) * 1e3:.0f}")
        self.assertEqual(row[5], "-")  # torch did not run
        self.assertEqual(os.listdir(folder), ["checkpoints.json"], "leftovers")

    def test_says_what_is_wrong(self):
        done = run("--contestants=nccl")
        self.assertIn("there is no contestant nccl: take some of ours, torch", done.stderr)
        done = run("--contestants=torch")
        self.assertIn("ours is what the others are compared with", done.stderr)


if __name__ == "__main__":
    unittest.main()
