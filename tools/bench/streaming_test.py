#!/usr/bin/env python3
"""Runs the streaming benchmark's own side on few images."""
import json
import os
import struct
import subprocess
import unittest

BENCH = "tools/bench/streaming.py"
IMAGES = 1000


def run(*flags):
    return subprocess.run([BENCH, *flags], capture_output=True, text=True)


def data_folder():
    folder = os.path.join(os.environ["TEST_TMPDIR"], "idx")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "train-images-idx3-ubyte"), "wb") as f:
        f.write(struct.pack(">4I", 0x803, IMAGES, 28, 28) + bytes(i * i // 7 % 251 for i in range(IMAGES * 784)))
    with open(os.path.join(folder, "train-labels-idx1-ubyte"), "wb") as f:
        f.write(struct.pack(">2I", 0x801, IMAGES) + bytes(i % 10 for i in range(IMAGES)))
    return folder


class StreamingTest(unittest.TestCase):
    def test_runs_every_case(self):
        path = os.path.join(os.environ["TEST_TMPDIR"], "streaming.json")
        done = run("--cases=order,gzip,shuffle,long,train", "--contestants=ours,bytes", "--rounds=1", "--copies=2",
                   "--long_copies=12", "--budget_mib=1", "--chunk_rows=32", "--batch=50", "--train_batches=3",
                   f"--data={data_folder()}", f"--json={path}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("of the bytes/s of read(2)", done.stdout)
        self.assertIn("long: resident MiB", done.stdout)
        self.assertNotIn("h5py", done.stdout)
        with open(path) as f:
            cases = json.load(f)
        for case, copies, epochs in (("order", 2, 5), ("gzip", 2, 1), ("shuffle", 2, 1), ("long", 12, 1)):
            runs = cases[case][0]["ours"]
            self.assertEqual(runs["samples"], copies * epochs * IMAGES)
            # Labels are read besides, in chunks of 4096 rows, and kept.
            chunks = epochs * -(-copies * IMAGES // 32) + -(-copies * IMAGES // 4096)
            self.assertEqual(runs["chunks_read"], chunks, case)
        self.assertLessEqual(cases["long"][0]["ours"]["budget_peak_mib"], 1)
        self.assertGreater(cases["order"][0]["bytes"]["bytes"], 5 * 2 * IMAGES * 784)
        self.assertEqual(cases["train"][0]["ours"]["samples"], 3 * 64)
        self.assertEqual(cases["train"][0]["ours, from memory"]["samples"], 3 * 64)

    def test_says_what_is_wrong(self):
        for flags, message in ((["--cases=backwards"], "there is no case backwards"),
                               (["--contestants=theirs"], "there is no contestant theirs"),
                               (["--contestants=ours", "--data=/nowhere"], "/nowhere")):
            done = run(*flags)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(message, done.stderr)


if __name__ == "__main__":
    unittest.main()
