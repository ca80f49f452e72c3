#!/usr/bin/env python3
"""Opens a report of fsdp_bench in a real browser: it is drawn, without an error, with the JSON's numbers."""
import html.parser
import json
import os
import re
import shutil
import subprocess
import unittest

BENCH = "tutorials/09_fsdp_bench/fsdp_bench"
BROWSER = "external/chromium/headless"


class Page(html.parser.HTMLParser):
    """What the browser made of a page: the table's numbers, the plots' parts, whatever the page loads."""

    def __init__(self, text):
        super().__init__()
        self.state = None
        self.rows = {}  # strategy -> the numbers of its row, as they are shown and as they are
        self.plots = {}  # id -> marks drawn
        self.loads = []
        self.words = []  # shown
        self._code = False
        self._row = self._plot = self._value = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in ("script", "style"):
            self._code = True
        if tag == "html":
            self.state = attrs.get("data-state")
        if tag == "tr":
            self._row = self.rows.setdefault(attrs["data-strategy"], []) if "data-strategy" in attrs else None
        if tag == "td" and "data-value" in attrs:
            self._value = float(attrs["data-value"])
        if "plot" in attrs.get("class", "").split():
            self._plot = attrs["id"]
            self.plots[self._plot] = 0
        if tag == "path" and self._plot:
            self.plots[self._plot] += 1
        for name in ("src", "href"):
            if name in attrs and not attrs[name].startswith(("#", "data:")):
                self.loads.append(attrs[name])

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._code = False
        if tag == "section":
            self._plot = None

    def handle_data(self, data):
        if not self._code:
            self.words.append(data)
        if self._value is not None:
            self._row.append((data, self._value))
            self._value = None


def browse(*flags):
    """Runs the browser without a network, and returns (page or nothing, its log)."""
    home = os.path.join(os.environ["TEST_TMPDIR"], "browser")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={home}",
         "--proxy-server=127.0.0.1:9", "--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=20000",
         "--window-size=1240,2300", *flags], capture_output=True, text=True, timeout=240)
    return done.stdout, done.stderr


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Its name needs escapes in an address.
        cls.folder = os.path.join(os.environ["TEST_TMPDIR"], "a report")
        cls.bench = subprocess.run([BENCH, "--ranks=2", "--model=vit", "--steps=4", "--batch=4", f"--report={cls.folder}"],
                                   capture_output=True, text=True)
        with open(os.path.join(cls.folder, "report.json")) as f:
            cls.report = json.load(f)
        url = "file://" + cls.folder.replace(" ", "%20") + "/report.html"
        dom, cls.log = browse("--dump-dom", url)
        cls.page = Page(dom)
        cls.unknown, cls.unknown_log = cls.browse_without_communication()
        outputs = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
        if outputs:
            browse(f"--screenshot={outputs}/report.png", url)
            shutil.copy(os.path.join(cls.folder, "report.html"), outputs)

    @classmethod
    def browse_without_communication(cls):
        """The same page where nobody knows how long communication was under way, as on a GPU."""
        report = json.loads(json.dumps(cls.report))
        for s in report["strategies"]:
            if s["strategy"] in ("ddp", "fsdp"):
                s["communication_ms"] = s["split_ms"]["hidden"] = None
        with open(os.path.join(cls.folder, "report.html")) as f:
            before, rest = f.read().split('id="data">', 1)
        path = os.path.join(os.environ["TEST_TMPDIR"], "unknown.html")
        with open(path, "w") as f:
            f.write(before + 'id="data">' + json.dumps(report) + rest[rest.index("</script>"):])
        dom, log = browse("--dump-dom", "file://" + path)
        return Page(dom), log

    def test_is_drawn_where_communication_is_unknown(self):
        self.assertEqual(self.unknown.state, "ready", self.unknown_log)
        self.assertEqual(re.findall(r".*CONSOLE.*", self.unknown_log), [])
        words = " ".join(self.unknown.words)
        self.assertEqual(len(re.findall(r"[\d.]+ ms exposed", words)), 2, words)
        self.assertNotIn("is hidden behind computing", words)
        self.assertIn("is hidden behind computing", " ".join(self.page.words))
        self.assertNotIn("NaN", words)

    def test_is_drawn_without_an_error(self):
        self.assertEqual(self.bench.returncode, 0, self.bench.stderr)
        self.assertIn(f"Report: {self.folder}/report.html", self.bench.stdout)
        self.assertEqual(self.page.state, "ready", self.log)
        self.assertEqual(re.findall(r".*CONSOLE.*", self.log), [])
        self.assertEqual(sorted(self.page.plots), ["bytes", "loss", "memory", "peak", "time"])
        for name, marks in self.page.plots.items():
            self.assertGreaterEqual(marks, 4, f"{name} has next to nothing in it")

    def test_loads_nothing(self):
        self.assertEqual(self.page.loads, [])
        self.assertNotIn("ERR_", self.log)

    def test_shows_the_numbers_of_the_json(self):
        self.assertEqual(list(self.page.rows), [s["strategy"] for s in self.report["strategies"]])
        for s in self.report["strategies"]:
            formula, peak = s["formula_bytes"], s["peak_bytes"]
            expected = [peak["parameters"], formula["parameters"], peak["gradients"], formula["gradients"],
                        peak["optimizer"], formula["optimizer"], s["kept_bytes"], formula["kept"],
                        s["sent_bytes_per_step"], formula["sent_per_step"], s["total_peak_bytes"], s["step_ms"],
                        s["samples_per_s"], s["losses"][-1]]
            row = self.page.rows[s["strategy"]]
            self.assertEqual([value for _, value in row], expected, s["strategy"])
            for i, (shown, value) in enumerate(row):
                unit = 2**20 if i < 11 else 1
                self.assertAlmostEqual(float(shown.lstrip("≤ ")), value / unit, delta=0.006 * value / unit, msg=f"column {i}")
        text = " ".join(self.page.words)
        self.assertIn(f"{self.report['parameters']:,} parameters", text)
        for s in self.report["strategies"]:
            for name in s["timeline_files"]:
                self.assertIn(name, text)

    def test_the_json_holds_together(self):
        for s in self.report["strategies"]:
            name = s["strategy"]
            self.assertAlmostEqual(sum(s["split_ms"].values()), s["step_ms"], places=6, msg=name)
            self.assertEqual(sum(s["peak_make_up_bytes"].values()), s["total_peak_bytes"], name)
            timeline = s["timeline"]
            self.assertEqual(sorted(timeline["phases_ms"]), ["averaging", "backward", "forward", "optimizer"], name)
            times = timeline["time_ms"]
            self.assertEqual(times, sorted(times), name)
            self.assertGreater(len(times), 20, name)
            sums = [sum(bytes_) for bytes_ in zip(*timeline["bytes"].values())]
            self.assertEqual(len(sums), len(times), name)
            self.assertLessEqual(max(sums), s["total_peak_bytes"], name)
            self.assertGreater(max(sums), 0.8 * s["total_peak_bytes"], name)
            parameters = timeline["bytes"]["parameters"]
            self.assertLess(abs(max(parameters) - s["formula_bytes"]["parameters"]), 0.02 * max(parameters), name)

    def test_timelines_have_the_phases_of_a_rank(self):
        for s in self.report["strategies"]:
            self.assertEqual(len(s["timeline_files"]), s["ranks"])
            for rank, name in enumerate(s["timeline_files"]):
                with open(os.path.join(self.folder, name)) as f:
                    trace = json.load(f)
                self.assertEqual(trace["otherData"]["rank"], rank)
                self.assertEqual(trace["otherData"]["dropped_events"], 0)
                events = trace["traceEvents"]
                counts = {}
                for event in events:
                    if event["ph"] == "X":
                        counts[event["name"]] = counts.get(event["name"], 0) + 1
                for phase in ("FORWARD", "FORWARD blocks.0", "BACKWARD", "BACKWARD blocks.5", "OPTIMIZER", "WAIT_FOR_DATA"):
                    self.assertEqual(counts.get(phase), 3, f"{name}: {phase}")
                if s["strategy"] == "fsdp":
                    self.assertEqual(counts['ALLGATHER Unit "blocks.0"'], 6, name)
                    self.assertEqual(counts['REDUCESCATTER Unit "blocks.0"'], 3, name)
                elif s["ranks"] > 1:
                    self.assertGreaterEqual(counts["ALLREDUCE"], 3 * s["collectives_per_step"], name)
                self.assertTrue(any(e["ph"] == "C" and e["name"] == "memory: activations" for e in events), name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
