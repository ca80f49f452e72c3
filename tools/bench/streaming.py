#!/usr/bin/env python3
"""Streams the same HDF5 files with Lockstep, with h5py in a DataLoader and with read(2), in turn, side by side.

    tools/bazel run //tools/bench:streaming
    tools/bazel run //tools/bench:streaming -- --cases=order --contestants=ours,bytes --cold --copies=20
    tools/bazel run //tools/bench:streaming -- --cases=long,train --long_copies=60 --budget_mib=256

Cases: order, plain bytes (uint8 batches) against read(2) of the file; gzip, compressed, to float32, two threads;
shuffle, plain, to float32, and the same in order; long, a file of many times the memory budget; train, the convnet from
the file and from memory. README.md explains the table.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

CASES = ("order", "gzip", "shuffle", "long", "train")
CONTESTANTS = ("ours", "h5py", "bytes")
CREATE = "tutorials/08_mnist_ddp_multinode_streaming/create_mnist_h5"


def runfiles():
    """Where the programs of this benchmark are, under `bazel run`, in a test and started by hand."""
    for folder in (os.getcwd(), os.path.abspath(sys.argv[0]) + ".runfiles/lockstep",
                   os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bazel-bin")):
        if os.path.exists(os.path.join(folder, "tools/bench/stream")):
            return folder
    sys.exit("streaming: tools/bench/stream is not built: bazel run //tools/bench:streaming")


class Bench:
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.root = runfiles()
        self.peers = os.path.join(os.path.dirname(os.path.realpath(__file__)), "peers")
        self.python = None
        if "h5py" in args.contestants:
            made = subprocess.run([os.path.join(self.peers, "environment")], stdout=subprocess.PIPE, text=True)
            if made.returncode != 0:
                sys.exit(1)
            self.python = made.stdout.strip()

    def file(self, name, *flags):
        path = os.path.join(self.folder, f"{name}.h5")
        if not os.path.exists(path):
            print(f"writing {path}", file=sys.stderr, flush=True)
            self.run([os.path.join(self.root, CREATE), f"--output={path}", f"--data={self.args.data}",
                      f"--chunk_rows={self.args.chunk_rows}", *flags])
        return path

    def run(self, command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"streaming: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def stream(self, path, *flags):
        cold = ["--cold"] if self.args.cold else []
        return json.loads(self.run([os.path.join(self.root, "tools/bench/stream"), f"--file={path}",
                                    f"--data={self.args.data}", f"--batch={self.args.batch}",
                                    f"--decode_threads={self.args.threads}", *cold, *flags]))

    def h5py(self, path, *flags):
        return json.loads(self.run([self.python, os.path.join(self.peers, "stream.py"), "read", path,
                                    f"--batch={self.args.batch}", *flags]))

    def contestants(self, case):
        """Name and what to run, each of a case once a round."""
        a = self.args
        plain, packed = f"--copies={a.copies}", (f"--copies={a.copies}", "--gzip=4")
        chosen = {}
        if case == "order":
            path = self.file("plain", plain)
            # Both in one thread, and for longer than it takes to start; the second time it is not cold.
            epochs = f"--epochs={1 if a.cold else 5}"
            chosen["ours"] = lambda: self.stream(path, "--dtype=uint8", "--prefetch=0", epochs)
            chosen["bytes"] = lambda: self.stream(path, "--how=bytes", epochs)
        elif case == "gzip":
            path = self.file("gzip", *packed)
            chosen["ours"] = lambda: self.stream(path)
            chosen["h5py"] = lambda: self.h5py(path)
        elif case == "shuffle":
            path = self.file("plain", plain)
            chosen["ours"] = lambda: self.stream(path, "--how=shuffle")
            chosen["ours, in order"] = lambda: self.stream(path)
            chosen["h5py"] = lambda: self.h5py(path, "--shuffle")
            chosen["h5py, in order"] = lambda: self.h5py(path)
        elif case == "long":
            path = self.file("long", f"--copies={a.long_copies}")
            chosen["ours"] = lambda: self.stream(path, "--how=shuffle", f"--budget_mib={a.budget_mib}")
        elif case == "train":
            path = self.file("gzip", *packed)
            flags = ["--train=convnet", f"--batches={a.train_batches}", "--batch=64"]
            chosen["ours"] = lambda: self.stream(path, "--how=shuffle", *flags)
            chosen["ours, from memory"] = lambda: self.stream(path, "--how=memory", *flags)
        return {name: f for name, f in chosen.items() if name.split(",")[0] in a.contestants}


def median(rounds, name, key):
    values = [r[name][key] for r in rounds if name in r and key in r[name]]
    return statistics.median(values) if values else None


def ratio(rounds, key, name, other):
    values = [r[name][key] / r[other][key] for r in rounds if name in r and other in r]
    return statistics.median(values) if values else None


RATIOS = (  # case, what, value of which it is, contestants
    ("order", "of the bytes/s of read(2)", "bytes_per_s", "ours", "bytes"),
    ("gzip", "times the samples/s of h5py", "samples_per_s", "ours", "h5py"),
    ("shuffle", "times the samples/s of h5py, shuffled", "samples_per_s", "ours", "h5py"),
    ("shuffle", "of our own samples/s in order", "samples_per_s", "ours", "ours, in order"),
    ("train", "times the samples/s from memory", "samples_per_s", "ours", "ours, from memory"),
)


def report(cases):
    rows = [("case", "contestant", "samples/s", "MB/s", "waited %", "RSS MiB", "budget MiB", "chunks read")]
    for case, rounds in cases.items():
        for name in rounds[0]:
            def text(key, form, scale=1):
                value = median(rounds, name, key)
                return "-" if value is None else form.format(value * scale)
            rows.append((case, name, text("samples_per_s", "{:,.0f}"), text("bytes_per_s", "{:,.0f}", 1e-6),
                         text("loop_waited_share", "{:.1f}", 100), text("peak_rss_mib", "{:.0f}"),
                         text("budget_peak_mib", "{:.0f}"), text("chunks_read", "{:.0f}")))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, tuple("-" * w for w in widths))
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
             for row in rows]
    lines.append("")
    for case, what, key, name, other in RATIOS:
        value = ratio(cases.get(case, []), key, name, other)
        if value is not None:
            lines.append(f"{case}: {value:.2f} {what}")
    for rounds in [cases.get("long", [])]:
        for r in rounds:
            mib = [round(m) for m in r["ours"]["resident_mib"]]
            lines.append(f"long: resident MiB at each twentieth of the way: {' '.join(map(str, mib))}")
    return "\n".join(lines)


def words(text):
    return [word for word in text.split(",") if word]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", type=words, default="order,gzip,shuffle,train", help="also long; default: %(default)s")
    p.add_argument("--contestants", type=words, default=",".join(CONTESTANTS), help="default: %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="each contestant runs once a round; default: %(default)s")
    p.add_argument("--copies", type=int, default=10, help="of the 60,000 images in a file; default: %(default)s")
    p.add_argument("--long_copies", type=int, default=60, help="the same of the case long; default: %(default)s")
    p.add_argument("--budget_mib", type=int, default=256, help="memory budget of the case long; default: %(default)s")
    p.add_argument("--chunk_rows", type=int, default=256, help="images of a chunk; default: %(default)s")
    p.add_argument("--batch", type=int, default=256, help="default: %(default)s")
    p.add_argument("--threads", type=int, default=2, help="that decompress, ours; default: %(default)s")
    p.add_argument("--train_batches", type=int, default=200, help="of 64, in the case train; default: %(default)s")
    p.add_argument("--cold", action="store_true", help="the system forgets the file before each of our runs")
    p.add_argument("--folder", default="", help="where files are, and stay; default: a temporary folder")
    p.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="folder of the IDX files")
    p.add_argument("--json", default="", help="file for everything measured")
    a = p.parse_args()
    for names, known, what in ((a.cases, CASES, "case"), (a.contestants, CONTESTANTS, "contestant")):
        for name in names:
            if name not in known:
                p.error(f"there is no {what} {name}: take some of {', '.join(known)}")
    start = os.environ.get("BUILD_WORKING_DIRECTORY", ".")
    with tempfile.TemporaryDirectory(prefix="lockstep_streaming_") as temporary:
        if a.folder:
            a.folder = os.path.join(start, a.folder)
            os.makedirs(a.folder, exist_ok=True)
        bench = Bench(a, a.folder or temporary)
        cases = {}
        chosen = {case: bench.contestants(case) for case in a.cases}
        for round_ in range(a.rounds):
            for case, contestants in chosen.items():
                runs = {}
                for name, go in contestants.items():
                    runs[name] = go()
                    print(f"round {round_ + 1} of {a.rounds}: {case}, {name}: {runs[name]['seconds']:.2f} s",
                          file=sys.stderr, flush=True)
                cases.setdefault(case, []).append(runs)
    print(report(cases))
    if a.json:
        with open(os.path.join(start, a.json), "w") as f:
            json.dump(cases, f, indent=1)


if __name__ == "__main__":
    main()
