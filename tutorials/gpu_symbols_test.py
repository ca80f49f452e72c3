#!/usr/bin/env python3
"""Programs built for GPUs find all libraries and symbols that they need in the wheels, and start without a GPU and its driver."""
import os
import re
import shutil
import subprocess
import sys
import unittest

PROGRAMS = []  # main's arguments
DRIVER = "libcuda.so.1"  # comes with the GPU's driver, in no wheel


def loaded(program):
    """What the dynamic linker says about a program when it resolves every symbol: (libraries, complaints)."""
    done = subprocess.run(["ldd", "-r", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    libraries, complaints = set(), []
    for line in done.stdout.splitlines():
        found = re.match(r"\s*(\S+) => (.*)", line)
        if found and found[2] != "not found":
            libraries.add(found[1])
        elif found and found[1] != DRIVER or "undefined symbol" in line:
            complaints.append(line.strip())
    return libraries, complaints


class GpuSymbolsTest(unittest.TestCase):
    def test_all_are_found(self):
        for program in PROGRAMS:
            with self.subTest(program=program):
                libraries, complaints = loaded(program)
                self.assertEqual(complaints, [])
                for library in ("libtorch_cuda.so", "libnccl.so.2", "libcudart.so.", "libcudnn.so."):
                    self.assertTrue(any(name.startswith(library) for name in libraries), library)

    def test_they_start(self):
        for program in PROGRAMS:
            with self.subTest(program=program):
                done = subprocess.run([program, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                self.assertEqual(done.returncode, 0, done.stdout)

    def test_they_look_for_gpus(self):
        for name in ("nccl_gpu_test", "torch_dist_gpu"):
            program = next(each for each in PROGRAMS if each.endswith("/" + name))
            with self.subTest(program=program):
                done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_missing_library_is_noticed(self):
        elsewhere = shutil.copy(PROGRAMS[0], os.environ["TEST_TMPDIR"])
        self.assertTrue(any("libtorch_cuda.so" in complaint for complaint in loaded(elsewhere)[1]))


if __name__ == "__main__":
    PROGRAMS = sys.argv[1:]
    unittest.main(argv=sys.argv[:1])
