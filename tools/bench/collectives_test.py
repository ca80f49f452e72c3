#!/usr/bin/env python3
"""Runs the benchmark's own side on tiny sizes."""
import json
import os
import subprocess
import unittest

BENCH = "tools/bench/collectives.py"


def run(*flags):
    return subprocess.run([BENCH, *flags], capture_output=True, text=True)


class CollectivesTest(unittest.TestCase):
    def test_figures_agree(self):
        path = os.path.join(os.environ["TEST_TMPDIR"], "collectives.json")
        done = run("--contestants=ours,busy", "--ranks=2,3", "--rounds=2", "--samples=2", "--max_bytes=100000",
                   "--busy_bytes=100000", "--compute_ms=0.5", f"--json={path}")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(path) as f:
            reports = json.load(f)
        self.assertEqual([report["ranks"] for report in reports], [2, 3])
        for report in reports:
            n = report["ranks"]
            calls = {(call["who"], call["what"], call["bytes"]): call for call in report["calls"]}
            self.assertEqual(set(calls), {(who, what, size)
                                          for who in ("lockstep", "any tensor", "mpi", "memcpy")
                                          for what in ("AllReduce", "ReduceScatter", "AllGather")
                                          for size in (1024, 8192, 65536, 100000)})
            for (who, what, size), call in calls.items():
                self.assertGreater(call["seconds"], 0)
                passes = 2 if what == "AllReduce" else 1
                self.assertAlmostEqual(call["busbw"] * call["seconds"], passes * (n - 1) / n * size, places=3)
            for who in ("lockstep", "mpi"):
                overlap, late = report["busy"]["overlap"][who], report["busy"]["late"][who]
                self.assertGreater(min(*overlap.values(), *late.values()), 0)
        # A row of the table: what was written, in microseconds.
        call = next(c for c in reports[0]["calls"]
                    if (c["who"], c["what"], c["bytes"]) == ("lockstep", "AllReduce", 8192))
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith("AllReduce")]
        self.assertEqual(rows[1][:3], ["AllReduce", "8192", f"{call['seconds'] * 1e6:.1f}"])
        self.assertEqual(rows[1][7], "-")  # Gloo did not run

    def test_says_what_is_wrong(self):
        done = run("--contestants=nccl")
        self.assertIn("there is no contestant nccl: take some of ours, gloo, busy", done.stderr)
        done = run("--contestants=ours", "--ranks=1")
        self.assertIn("one rank has nobody to talk to: --ranks=2 or more", done.stderr)
        self.assertEqual(done.returncode, 1)


if __name__ == "__main__":
    unittest.main()
