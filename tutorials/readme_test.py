#!/usr/bin/env python3
"""What the READMEs of the tutorials and of the repository promise: their commands run, and print what is quoted.

Commands run as they are written, but for SHORTER; with --config=soak also at their full length. Those of the tutorials
for clusters (06 to 08) are run by readme_multinode_test.
"""
import glob
import os
import pty
import re
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.abspath("tutorials"))

from readmes import FOLDER, SOAK, alike, blocks, missing, run, script  # noqa: E402

READMES = sorted(path for path in glob.glob("tutorials/*/README.md") if not re.search("/0[678]_", path))
# Added to a command that would take long. A flag that is given twice has its last value.
SHORTER = {
    "fsdp_bench": ["--model=mlp", "--steps=4", "--batch=8"],
    "mnist_ddp": ["--epochs=1", "--steps=5"],
    "mnist_training": ["--epochs=1", "--steps=5", "--model=mlp"],
}
# Whose quoted output is compared line by line, at full length.
QUOTED = ["00_torch_dist", "03_mnist_distributed", "04_mnist_manual_ddp", "05_mnist_ddp"]
if SOAK:
    SHORTER = {}
    QUOTED.append("02_mnist_training")
TIMES = 5  # columns of 09's table, after the first, that are times or follow from them


def shorter(program):
    return SHORTER.get(program, [])


def quote_of(path):
    return [block.lines for block in blocks(path) if block.title in ("What you see", "What you should see")
            and not block.is_command()]


def first_command(path):
    return next(block.lines for block in blocks(path) if block.title == "Run it")


def without_times(line):
    """A line of 09's table, without what is a time or follows from one; large numbers in a form that may differ a little."""
    words = line.split()
    if words and words[0] in ("none", "manual", "ddp", "fsdp"):
        words[1:1 + TIMES] = ["-" if word == "-" else "..." for word in words[1:1 + TIMES]]
        words = [word + ".0" if re.fullmatch(r"\d{3}", word) else word for word in words]
    return " ".join(words)


def descendants(pid):
    """The processes that it started and that these started, as (pid, name), in the order of their numbers."""
    parents, names = {}, {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as f:
                head, tail = f.read().rsplit(")", 1)
        except OSError:  # it has ended
            continue
        number, name = head.split(" (", 1)
        parents[int(number)], names[int(number)] = int(tail.split()[1]), name
    found = {pid}
    for number in sorted(parents):
        if parents[number] in found:
            found.add(number)
    return [(number, names[number]) for number in sorted(found - {pid})]


class ReadmeTest(unittest.TestCase):
    def test_commands_run(self):
        seen = 0
        for path in READMES + ["tutorials/README.md", "README.md"]:
            for block in blocks(path):
                whole = os.path.basename(os.path.dirname(path)) in QUOTED and block.lines == first_command(path)
                # Those of tools/bench have tests of their own.
                if not block.is_command() or whole or "//tools/bench" in block.lines[0]:
                    continue
                seen += 1
                with self.subTest(path=path, lines=block.lines):
                    done = run(block.lines, shorter)
                    self.assertIn(done.returncode, (0, 75), done.stdout)  # 75: --time_limit
        self.assertGreater(seen, 10)

    def test_quoted_output_is_what_is_printed(self):
        for folder in QUOTED:
            path = "tutorials/%s/README.md" % folder
            quoted = quote_of(path)[0]
            done = run(first_command(path))
            self.assertEqual(done.returncode, 0, done.stdout)
            printed = done.stdout.splitlines()
            self.assertEqual(len(printed), len(quoted), done.stdout)
            for line in quoted:
                with self.subTest(folder=folder, quoted=line):
                    self.assertTrue(any(alike(line, p) for p in printed), done.stdout)

    def test_the_table_of_09_is_what_is_printed(self):
        """And that of the repository's README. On two ranks, as there; times are not compared."""
        path = "tutorials/09_fsdp_bench/README.md"
        done = run(first_command(path)[:1], lambda program: ["--ranks=2"])
        self.assertEqual(done.returncode, 0, done.stdout)
        printed = [without_times(line) for line in done.stdout.splitlines()]
        for readme in (path, "README.md"):
            quoted = [without_times(line) for block in quote_of(readme) for line in block]
            self.assertGreater(len(quoted), 15)
            wrong = [line for line in quoted if not any(alike(line, p) for p in printed)]
            self.assertEqual(wrong, [], readme + "\n" + done.stdout)

    def test_errors_look_as_shown(self):
        seen = 0
        for path in READMES:
            for block in blocks(path):
                if not block.is_shown() or "=buffered" in block.lines[0]:
                    continue
                seen += 1
                with self.subTest(path=path, lines=block.lines):
                    self.check_shown(block)
        self.assertGreater(seen, 20)

    def check_shown(self, block):
        commands = [line for line in block.lines if line.startswith("$ ")]
        fault = re.match(r"\$ pkill -(KILL|STOP) -n (\w+)", commands[-1])
        done = self.run_with_fault(commands[:-1], fault[1], fault[2]) if fault else run(commands)
        if any(re.match(r"(\w+|rank \d+): |rank \d+ (was|exited)", line) for line in block.lines):
            self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertEqual(missing(block, done), [], done.stdout)

    def run_with_fault(self, commands, name, program):
        """Runs them, and sends the signal of that name to the program's rank that started last; not to another's, as pkill would."""
        process = subprocess.Popen(["bash", "-c", script(commands, lambda _: ())], cwd=FOLDER, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        end = time.monotonic() + 60
        while len(ranks := [pid for pid, n in descendants(process.pid) if n == program]) < 2:
            self.assertLess(time.monotonic(), end)
            self.assertIsNone(process.poll())
            time.sleep(0.1)
        time.sleep(4)  # until they train
        os.kill(ranks[-1], getattr(signal, "SIG" + name))
        out, _ = process.communicate(timeout=120)
        return subprocess.CompletedProcess(commands, process.returncode, out)

    def test_a_buffer_is_lost_without_a_terminal(self):
        path = "tutorials/debugging/README.md"
        command, shown, piped = next(block.lines for block in blocks(path) if "=buffered" in block.lines[0])
        theirs, ours = pty.openpty()
        subprocess.run(["bash", "-c", script([command], lambda _: ())], stdin=subprocess.DEVNULL, stdout=ours, check=False)
        self.assertEqual(os.read(theirs, 1000).decode().strip(), shown)
        self.assertEqual(run([piped]).stdout, "")

    def test_a_wrong_quote_is_found(self):
        line = "epoch 1: loss 0.5292, 235 steps in ... s"
        self.assertTrue(alike(line, "epoch 1: loss 0.5301, 235 steps in 7.3 s"))
        for other in ("epoch 1: loss 0.6292, 235 steps in 7.3 s", "epoch 2: loss 0.5292, 235 steps in 7.3 s",
                      "epoch 1: loss 0.5292, 234 steps in 7.3 s", "epoch 1: loss 0.5292, 235 steps"):
            self.assertFalse(alike(line, other))
        self.assertTrue(alike("AllReduce #87 of rank 1: 5.8e-07.", "AllReduce #93 of rank 1: 6.1e-07."))
        self.assertFalse(alike("AllReduce #87 of rank 1: 5.8e-07.", "AllReduce #87 of rank 2: 5.8e-07."))
        self.assertFalse(alike("within 5.8e-07.", "within 5.8e-03."))


if __name__ == "__main__":
    unittest.main()
