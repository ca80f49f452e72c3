#!/usr/bin/env python3
"""What --tensorboard writes, read by TensorBoard itself."""
import os
import re
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["TEST_SRCDIR"], "tensorboard"))
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

PROGRAM = "02_mnist_training/mnist_training"


def train(program, *flags):
    return subprocess.run(["tutorials/" + program, "--model=mlp", "--batch=16", *flags], capture_output=True, text=True)


def folder_of(name):
    return os.path.join(os.environ["TEST_TMPDIR"], "runs", name)


class TensorBoardTest(unittest.TestCase):
    def curves(self, folder):
        """The curves of a folder with one file, by their tags."""
        self.assertEqual(len(os.listdir(folder)), 1)
        events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
        curves = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        self.assertEqual(sorted(curves), ["memory/resident_mib", "test/accuracy", "test/loss", "train/loss",
                                          "train/samples_per_second"])
        return curves

    def assert_is_printed(self, curves, lines, epochs, steps):
        """The numbers are those that the program prints."""
        for tag in ("train/loss", "train/samples_per_second", "memory/resident_mib"):
            self.assertEqual([event.step for event in curves[tag]], list(range(1, epochs * steps + 1)), tag)
        printed = re.findall(r"test loss ([\d.]+), test accuracy ([\d.]+) %", lines)
        self.assertEqual([f"{event.value:.4f}" for event in curves["test/loss"]], [loss for loss, _ in printed])
        self.assertEqual([f"{event.value:.2f}" for event in curves["test/accuracy"]], [right for _, right in printed])
        means = re.findall(r"epoch \d: loss ([\d.]+)", lines)
        self.assertEqual(len(means), epochs)
        losses = [event.value for event in curves["train/loss"]]
        for epoch, mean in enumerate(means):
            self.assertAlmostEqual(sum(losses[steps * epoch:steps * (epoch + 1)]) / steps, float(mean), delta=1e-4)
        self.assertTrue(all(event.value > 0 for event in curves["train/samples_per_second"]))
        self.assertTrue(all(20 < event.value < 20000 for event in curves["memory/resident_mib"]))

    def test_reads_what_training_writes(self):
        folder = folder_of("one")
        done = train(PROGRAM, "--epochs=2", "--steps=20", f"--tensorboard={folder}")
        self.assertEqual(done.returncode, 0, done.stderr)
        curves = self.curves(folder)
        self.assert_is_printed(curves, done.stdout, epochs=2, steps=20)
        self.assertEqual([event.step for event in curves["test/accuracy"]], [0, 20, 40])
        times = [event.wall_time for event in curves["train/loss"]]
        self.assertEqual(times, sorted(times))

    def test_rank_0_writes_for_all(self):
        for program in ("04_mnist_manual_ddp/mnist_manual_ddp", "05_mnist_ddp/mnist_ddp", "07_mnist_ddp_multinode/mnist_ddp"):
            with self.subTest(program=program):
                folder = folder_of(program)
                done = train(program, "--ranks=2", "--epochs=2", "--steps=5", f"--tensorboard={folder}")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assert_is_printed(self.curves(folder), done.stdout, epochs=2, steps=5)

    def test_ranks_that_train_alone_write_each(self):
        folder = folder_of("alone")
        done = train("03_mnist_distributed/mnist_distributed", "--ranks=2", "--epochs=2", "--steps=5", f"--tensorboard={folder}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(os.listdir(folder)), ["rank0", "rank1"])
        for rank in (0, 1):
            lines = "\n".join(line for line in done.stdout.splitlines() if line.startswith(f"rank {rank} of 2: "))
            self.assert_is_printed(self.curves(f"{folder}/rank{rank}"), lines, epochs=2, steps=5)

    def test_says_what_is_wrong(self):
        done = train(PROGRAM, "--epochs=1", "--steps=1", "--tensorboard=/dev/null/runs")
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot make the folder /dev/null/runs for TensorBoard", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
