#!/usr/bin/env python3
"""tools/gpu_tests with a Bazel and an nvidia-smi that only say what they are told to."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest

XML = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="5" name="AllTests"><testsuite name="Suite" tests="5">
{}
</testsuite></testsuites>
"""
PASSED = '<testcase name="Adds" status="run" result="completed" time="1.25" classname="Suite" />'
DISABLED = '<testcase name="DISABLED_Adds" status="notrun" result="suppressed" time="0" classname="Suite" />'
SKIPPED = ('<testcase name="OnTwo/1" status="run" result="skipped" time="0" classname="Gpus">'
           '<skipped message="a/b_test.cc:22&#x0A;needs 2 GPUs, and this process sees 1"/></testcase>')
FAILED = ('<testcase name="Sums" status="run" result="completed" time="0.5" classname="Suite">'
          '<failure message="a/b_test.cc:7&#x0A;Expected: 3&#x0A;Actual: 4" type=""/>'
          '<failure message="another" type=""/></testcase>')
BY_BAZEL = '<testcase name="a/sh_test" status="run" duration="2" time="2"></testcase>'
BAZEL = """#!/bin/bash
printf '%s\\n' "$@" >"$FAKE/arguments"
for argument; do
  case $argument in --build_event_json_file=*) cat "$FAKE/events" >"${argument#*=}" ;; esac
done
exit "$(cat "$FAKE/status")"
"""


def configured(target, tags=("exclusive", "gpu")):
    return {"id": {"targetConfigured": {"label": target}}, "configured": {"testSize": "SMALL", "tag": list(tags)}}


class GpuTestsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
        os.makedirs(os.path.join(self.folder, "tools"))
        os.makedirs(os.path.join(self.folder, "bin"))
        self.program = shutil.copy("tools/gpu_tests", os.path.join(self.folder, "tools"))
        self.script("tools/bazel", BAZEL)
        self.script("bin/nvidia-smi", "#!/bin/bash\necho 'NVIDIA H200, 580.95.05, 143771 MiB'\n")
        self.events = []

    def script(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, 0o755)

    def add(self, target, status, *testcases):
        """A test that Bazel runs, with what it writes."""
        path = os.path.join(self.folder, f"{len(self.events)}.xml")
        with open(path, "w") as f:
            f.write(XML.format("\n".join(testcases)))
        outputs = [{"name": "test.log", "uri": "file:///log"}, {"name": "test.xml", "uri": "file://" + path}]
        self.events += [configured(target), {"id": {"testResult": {"label": target, "run": 1}},
                                             "testResult": {"status": status, "testActionOutput": outputs}}]

    def run_it(self, bazel_status=0):
        """Its exit status, the rows of the table, and the lines after it."""
        with open(os.path.join(self.folder, "events"), "w") as f:
            f.write("".join(json.dumps(event) + "\n" for event in self.events))
        with open(os.path.join(self.folder, "status"), "w") as f:
            f.write(str(bazel_status))
        done = subprocess.run([self.program, "//a/..."], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=dict(os.environ, FAKE=self.folder, PATH=f"{self.folder}/bin:{os.environ['PATH']}"))
        lines = done.stdout.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("target "))
        self.before = lines[:start]
        rows = [line for line in lines[start + 1:] if line.startswith("//")]
        return done.returncode, rows, lines[start + 1 + len(rows):]

    def test_a_table_of_all_cases(self):
        self.add("//b:b_test", "PASSED", SKIPPED, DISABLED, PASSED)
        self.add("//a:sh_test", "PASSED", BY_BAZEL)
        self.events.append(configured("//c:other_test", tags=["mpi"]))
        status, rows, rest = self.run_it()
        self.assertEqual(status, 0)
        self.assertEqual(self.before, ["GPU 0: NVIDIA H200, 580.95.05, 143771 MiB"])
        self.assertEqual(rows, [
            "//a:sh_test  a/sh_test     passed   2.00",
            "//b:b_test   Gpus.OnTwo/1  skipped  0.00  a/b_test.cc:22 needs 2 GPUs, and this process sees 1",
            "//b:b_test   Suite.Adds    passed   1.25",
        ])
        self.assertEqual(rest, ["2 passed, 0 failed, 1 skipped"])
        with open(os.path.join(self.folder, "arguments")) as f:
            words = f.read().split()
        self.assertEqual(words[:3] + words[-1:], ["test", "--config=gpu", "--test_tag_filters=gpu", "//a/..."])

    def test_a_failure(self):
        self.add("//b:b_test", "FAILED", PASSED, FAILED)
        status, rows, rest = self.run_it(bazel_status=3)
        self.assertEqual(status, 1)
        self.assertEqual(rows[1], "//b:b_test  Suite.Sums  failed  0.50  a/b_test.cc:7 Expected: 3 Actual: 4")
        self.assertEqual(rest, ["gpu_tests: tests failed", "1 passed, 1 failed, 0 skipped"])

    def test_a_crash_between_cases(self):
        self.add("//b:b_test", "TIMEOUT", PASSED)
        status, rows, rest = self.run_it(bazel_status=3)
        self.assertEqual(status, 1)
        self.assertIn("ended outside of its cases", rows[1])
        self.assertEqual(rest[-1], "1 passed, 1 failed, 0 skipped")

    def test_one_that_does_not_build(self):
        self.add("//a:a_test", "PASSED", PASSED)
        self.events.append(configured("//b:b_test"))
        status, rows, rest = self.run_it(bazel_status=1)
        self.assertEqual(status, 1)
        self.assertIn("was not run: it does not build", rows[1])
        self.assertEqual(rest[-1], "1 passed, 1 failed, 0 skipped")

    def test_a_file_that_is_cut_off(self):
        self.add("//b:b_test", "PASSED", "<testcase")
        status, rows, _ = self.run_it()
        self.assertEqual(status, 1)
        self.assertIn("no test.xml that can be read: not well-formed", rows[0])

    def test_nothing_was_run(self):
        status, rows, rest = self.run_it(bazel_status=4)
        self.assertEqual((status, rows), (1, []))
        self.assertEqual(rest, ["gpu_tests: nothing was run: no test with the tag gpu there, or Bazel ended before",
                                "0 passed, 0 failed, 0 skipped"])

    def test_bazel_fails_for_another_reason(self):
        self.add("//b:b_test", "PASSED", PASSED)
        status, _, rest = self.run_it(bazel_status=1)
        self.assertEqual(status, 1)
        self.assertEqual(rest, ["gpu_tests: Bazel ended with 1: see above", "1 passed, 0 failed, 0 skipped"])

    def test_all_are_skipped_without_a_gpu(self):
        self.script("bin/nvidia-smi", "#!/bin/bash\necho 'No devices were found'\nexit 6\n")
        self.add("//b:b_test", "PASSED", SKIPPED)
        status, _, rest = self.run_it()
        self.assertEqual(status, 1)
        self.assertEqual(rest, ["gpu_tests: all were skipped: nvidia-smi says: No devices were found",
                                "0 passed, 0 failed, 1 skipped"])
        self.assertEqual(self.before, ["no GPU: nvidia-smi says: No devices were found"])

    def test_all_are_skipped_with_one(self):
        self.add("//b:b_test", "PASSED", SKIPPED)
        status, _, rest = self.run_it()
        self.assertEqual(status, 1)
        self.assertEqual(rest[0], "gpu_tests: all were skipped: see the reasons above")


if __name__ == "__main__":
    unittest.main()
