#!/usr/bin/env python3
"""Runs the benchmark's own side, a few steps long."""
import json
import os
import subprocess
import unittest

BENCH = "tools/bench/training.py"


def run(*flags):
    return subprocess.run([BENCH, *flags], capture_output=True, text=True)


class TrainingTest(unittest.TestCase):
    def test_prints_a_row_for_each_case(self):
        path = os.path.join(os.environ["TEST_TMPDIR"], "training.json")
        done = run("--contestants=ours,serial,null", "--models=mlp", "--ranks=1,2", "--bucket_mib=default,0.001",
                   "--rounds=1", "--steps=3", "--warmup=1", "--batch=5", f"--json={path}")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith("mlp")]
        self.assertEqual([row[:3] for row in rows],
                         [["mlp", "1", "default"], ["mlp", "1", "0.001"], ["mlp", "2", "default"], ["mlp", "2", "0.001"]])
        for row in rows:
            self.assertEqual(row[5], "-")  # PyTorch did not run
            self.assertGreater(float(row[7]), 0)  # the limit
        with open(path) as f:
            cases = json.load(f)
        payload = 4 * 1863690  # of the mlp's gradients
        for case in cases:
            for name, run_ in case["rounds"][0].items():
                self.assertEqual(len(run_["losses"]), 3)
                self.assertEqual(run_["ranks"], case["ranks"])
                self.assertEqual(run_["payload_bytes"], payload, name)
        self.assertGreater(cases[3]["rounds"][0]["ours"]["collectives"], cases[2]["rounds"][0]["ours"]["collectives"])

    def test_other_strategies(self):
        for strategy in ("fsdp", "manual"):
            done = run("--contestants=ours,null", "--models=mlp", f"--strategy={strategy}", "--rounds=1", "--steps=3",
                       "--warmup=1", "--batch=5", "--optimizer=sgd")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"\n{strategy}, sgd, batch 5 a rank", done.stdout)

    def test_says_what_is_wrong(self):
        for flags, message in ((["--models=resnet"], "there is no model resnet"),
                               (["--contestants=theirs"], "there is no contestant theirs"),
                               (["--contestants=ours", "--models=mlp", "--steps=3", "--warmup=3"],
                                "--warmup must be below --steps"),
                               (["--contestants=ours", "--models=mlp", "--steps=9", "--data=/nowhere"], "/nowhere")):
            done = run("--rounds=1", *flags)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(message, done.stderr)


if __name__ == "__main__":
    unittest.main()
