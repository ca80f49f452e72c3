#!/usr/bin/env python3
"""What the tutorials' READMEs promise: their commands run, and print what is quoted below "What you should see".

Commands run as they are written, but for SHORTER; with --config=soak also at their full length. Numbers of the quoted
output may be 5 % off, as they depend on the processor a little; "..." stands for one that varies, such as a time.
The tutorials for clusters (06 to 08) are run as written by multinode_test.
"""
import glob
import os
import re
import shlex
import subprocess
import unittest

SOAK = "LOCKSTEP_SOAK" in os.environ
FOLDER = os.environ["TEST_TMPDIR"]
PROGRAMS = {  # target: the program
    "create_mnist_h5": "08_mnist_ddp_multinode_streaming/create_mnist_h5",
    "debugging": "debugging/debugging",
    "fsdp_bench": "09_fsdp_bench/fsdp_bench",
    "mnist_ddp": "05_mnist_ddp/mnist_ddp",
    "mnist_distributed": "03_mnist_distributed/mnist_distributed",
    "mnist_manual_ddp": "04_mnist_manual_ddp/mnist_manual_ddp",
    "mnist_training": "02_mnist_training/mnist_training",
    "torch_dist": "00_torch_dist/torch_dist",
    "torch_dist_gpu": "01_torch_dist_gpu/torch_dist_gpu",
}
# Added to a command that would take long. A flag that is given twice has its last value.
SHORTER = {
    "fsdp_bench": ["--model=mlp", "--steps=4", "--batch=8"],
    "mnist_ddp": ["--epochs=1", "--steps=5"],
    "mnist_training": ["--epochs=1", "--steps=5", "--model=mlp"],
}
# Whose quoted output is compared number by number, from the first command of the README: those that take seconds.
QUOTED = {
    "00_torch_dist": "torch_dist",
    "03_mnist_distributed": "mnist_distributed",
    "04_mnist_manual_ddp": "mnist_manual_ddp",
    "05_mnist_ddp": "mnist_ddp",
}
if SOAK:
    SHORTER = {}
    QUOTED["02_mnist_training"] = "mnist_training"
COMMAND = re.compile(r"tools/bazel run //tutorials:(\w+)((?: -- [^;|#\n]*)?)")


def blocks(path):
    """The indented blocks of a README, each as (title of its section, lines)."""
    title, block, result = "", [], []
    with open(path) as f:
        for line in f.read().replace("\\\n", " ").split("\n") + [""]:
            if line.startswith("    "):
                block.append(line.strip())
                continue
            if block:
                result.append((title, block))
                block = []
            if line.startswith("## "):
                title = line[3:]
    return result


def run(target, words):
    return subprocess.run([os.path.abspath("tutorials/" + PROGRAMS[target]), *words], cwd=FOLDER, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alike(quoted, printed):
    """Whether two lines are the same but for small differences of numbers, and anything for "..."."""
    quoted, printed = quoted.split(), printed.split()
    return len(quoted) == len(printed) and all(map(words_alike, quoted, printed))


def words_alike(quoted, printed):
    if quoted == "..." or quoted == printed:
        return True
    number = re.compile(r"-?\d+\.?\d*")
    if number.sub("#", quoted) != number.sub("#", printed):
        return False
    return all("." in a + b and abs(float(a) - float(b)) <= 0.05 * abs(float(a)) + 0.01
               for a, b in zip(number.findall(quoted), number.findall(printed)))


class ReadmeTest(unittest.TestCase):
    def test_commands_run(self):
        seen = 0
        for path in sorted(glob.glob("tutorials/*/README.md") + ["tutorials/README.md", "README.md"]):
            for title, block in blocks(path):
                for target, flags in COMMAND.findall("\n".join(block)):
                    if target not in PROGRAMS or "What goes wrong" in title or block[0].startswith("$"):
                        continue
                    seen += 1
                    with self.subTest(path=path, target=target, flags=flags):
                        words = shlex.split(flags.replace("/tmp/", FOLDER + "/"))[1:] + SHORTER.get(target, [])
                        quotes = QUOTED.get(os.path.basename(os.path.dirname(path))) == target and title == "Run it"
                        if quotes:  # in full, by the other test
                            continue
                        done = run(target, words)
                        self.assertIn(done.returncode, (0, 75), done.stderr)  # 75: --time_limit
        self.assertGreater(seen, 15)

    def test_quoted_output_is_what_is_printed(self):
        for folder, target in QUOTED.items():
            path = "tutorials/%s/README.md" % folder
            commands = [c for title, block in blocks(path) if title == "Run it" for c in COMMAND.findall("\n".join(block))]
            quoted = next(block for title, block in blocks(path) if title == "What you should see")
            self.assertEqual(commands[0][0], target)
            done = run(target, shlex.split(commands[0][1])[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
            printed = done.stdout.splitlines()
            self.assertEqual(len(printed), len(quoted), done.stdout)
            for line in quoted:
                with self.subTest(folder=folder, quoted=line):
                    self.assertTrue(any(alike(line, p) for p in printed), done.stdout)

    def test_debugging_shows_what_it_says(self):
        path = "tutorials/debugging/README.md"
        seen = 0
        for _, block in blocks(path):
            match = re.match(r"\$ ((?:[A-Z_]+=\w+ )?)tools/bazel run //tutorials:debugging((?: -- .*)?)$", block[0])
            if not match:
                continue
            seen += 1
            env = dict(os.environ, **dict(w.split("=") for w in match[1].split()))
            done = subprocess.run([os.path.abspath("tutorials/debugging/debugging"), *shlex.split(match[2])[1:]], env=env,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.assertNotEqual(done.returncode, 0)
            for line in block[1:]:
                with self.subTest(quoted=line):
                    self.assertIn(line, done.stderr)
        self.assertGreater(seen, 3)

    def test_a_wrong_quote_is_found(self):
        line = "epoch 1: loss 0.5292, 235 steps in ... s"
        self.assertTrue(alike(line, "epoch 1: loss 0.5301, 235 steps in 7.3 s"))
        for other in ("epoch 1: loss 0.6292, 235 steps in 7.3 s", "epoch 2: loss 0.5292, 235 steps in 7.3 s",
                      "epoch 1: loss 0.5292, 234 steps in 7.3 s", "epoch 1: loss 0.5292, 235 steps"):
            self.assertFalse(alike(line, other))


if __name__ == "__main__":
    unittest.main()
