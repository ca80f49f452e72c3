#!/usr/bin/env python3
"""What the READMEs of the tutorials for clusters promise, on a Slurm of this machine's own; as readme_test does for the others."""
import os
import re
import sys
import unittest

sys.path.insert(0, os.path.abspath("tutorials"))

from readmes import FOLDER, SOAK, alike, blocks, missing, run  # noqa: E402

READMES = {  # and how many blocks of commands print what is quoted
    "tutorials/06_torch_dist_multi_node/README.md": 1,
    "tutorials/07_mnist_ddp_multinode/README.md": 1,
    "tutorials/08_mnist_ddp_multinode_streaming/README.md": 2,
}
SHORTER = {} if SOAK else {
    "mnist_ddp_multinode": ["--epochs=1", "--steps=5", "--model=mlp"],
    "mnist_ddp_multinode_streaming": ["--epochs=1", "--steps=5"],
}


def shorter(program):
    return SHORTER.get(program, [])


def typed(lines, shorter=lambda program: ()):
    """Runs the lines; those after salloc in its allocation."""
    if lines[0].startswith("salloc "):
        return run(lines[1:], shorter, before=[*lines[0].split(), "-Q"])
    return run(lines, shorter)


class ReadmeMultinodeTest(unittest.TestCase):
    def test_commands_run_and_print_what_is_quoted(self):
        for path, quoted_blocks in READMES.items():
            commands = [block for block in blocks(path) if block.is_command() and "tools/slurm/" not in "".join(block.lines)]
            printed = []
            for index, block in enumerate(commands):
                with self.subTest(path=path, lines=block.lines):
                    done = typed(block.lines) if index < quoted_blocks else typed(block.lines, shorter)
                    self.assertEqual(done.returncode, 0, done.stdout)
                if index < quoted_blocks:
                    printed += re.sub(r"allocation \d+", "allocation 1", done.stdout).splitlines()
            quoted = next(block.lines for block in blocks(path) if block.title == "What you should see")
            for line in quoted:
                with self.subTest(path=path, quoted=line):
                    self.assertTrue(any(alike(line, p) for p in printed), "\n".join(printed))
            self.assertEqual(len(printed), len(quoted), printed)

    def test_errors_look_as_shown(self):
        seen = 0
        for path in READMES:
            for block in blocks(path):
                if block.is_shown():
                    seen += 1
                    with self.subTest(path=path, lines=block.lines):
                        done = typed([line for line in block.lines if line.startswith("$ ")])
                        self.assertNotEqual(done.returncode, 0, done.stdout)
                        self.assertEqual(missing(block, done), [], done.stdout)
        self.assertGreater(seen, 3)


def main():
    if "LOCAL_CLUSTER_DIR" in os.environ:
        os.environ["HOME"] = FOLDER  # with no site file, and a place for copies that all nodes see
        unittest.main()
    sources = os.path.join(os.path.dirname(os.path.realpath(__file__)), "..")  # which may be in /tmp
    os.environ["SOURCES"] = sources  # and is no path in a command that run() would move
    # The cluster that a README starts: outside of the one below.
    for path in READMES:
        for block in blocks(path):
            if "tools/slurm/" in "".join(block.lines) and block.is_command():
                done = run([re.sub(r"--nodes 2", f"--nodes 2 --share {FOLDER} --share $SOURCES", line) for line in block.lines])
                if done.returncode != 0 or "sum over all ranks: 10\n" not in done.stdout:
                    sys.exit(f"{path}: {block.lines}: {done.returncode}: {done.stdout}")
    os.execv("tools/slurm/local_cluster", ["local_cluster", "--share", FOLDER, "--share", sources, "--", "python3", __file__])


if __name__ == "__main__":
    main()
