#!/usr/bin/env python3
"""What --tensorboard writes, read by TensorBoard itself."""
import os
import re
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["TEST_SRCDIR"], "tensorboard"))
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

PROGRAM = "tutorials/02_mnist_training/mnist_training"


def train(*flags):
    return subprocess.run([PROGRAM, "--model=mlp", "--batch=16", *flags], capture_output=True, text=True)


class TensorBoardTest(unittest.TestCase):
    def test_reads_what_training_writes(self):
        folder = os.path.join(os.environ["TEST_TMPDIR"], "runs", "one")
        done = train("--epochs=2", "--steps=20", f"--tensorboard={folder}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(os.listdir(folder)), 1)
        events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
        curves = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        self.assertEqual(sorted(curves), ["memory/resident_mib", "test/accuracy", "test/loss", "train/loss",
                                          "train/samples_per_second"])
        for tag in ("train/loss", "train/samples_per_second", "memory/resident_mib"):
            self.assertEqual([event.step for event in curves[tag]], list(range(1, 41)), tag)
        self.assertEqual([event.step for event in curves["test/accuracy"]], [0, 20, 40])
        times = [event.wall_time for event in curves["train/loss"]]
        self.assertEqual(times, sorted(times))

        # The numbers are those that the program prints.
        printed = re.findall(r"test loss ([\d.]+), test accuracy ([\d.]+) %", done.stdout)
        self.assertEqual([f"{event.value:.4f}" for event in curves["test/loss"]], [loss for loss, _ in printed])
        self.assertEqual([f"{event.value:.2f}" for event in curves["test/accuracy"]], [right for _, right in printed])
        means = re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)
        losses = [event.value for event in curves["train/loss"]]
        for epoch, mean in enumerate(means):
            self.assertAlmostEqual(sum(losses[20 * epoch:20 * epoch + 20]) / 20, float(mean), delta=1e-4)
        self.assertTrue(all(event.value > 0 for event in curves["train/samples_per_second"]))
        self.assertTrue(all(20 < event.value < 20000 for event in curves["memory/resident_mib"]))

    def test_says_what_is_wrong(self):
        done = train("--epochs=1", "--steps=1", "--tensorboard=/dev/null/runs")
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot make the folder /dev/null/runs for TensorBoard", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
