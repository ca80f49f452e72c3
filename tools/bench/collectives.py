#!/usr/bin/env python3
"""Times collectives of comm/mpi, of MPI itself and of Gloo in turn, and prints them side by side.

    tools/bazel run //tools/bench:collectives
    tools/bazel run //tools/bench:collectives -- --ranks=2,4 --rounds=3 --contestants=ours --json=/tmp/c.json

Contestants: ours (with bare MPI and memcpy, in the same processes); gloo (torch.distributed); busy (ours and bare MPI
beside computing, and waiting for a rank that computes). README.md explains the tables.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

CONTESTANTS = ("ours", "gloo", "busy")
KINDS = ("AllReduce", "ReduceScatter", "AllGather")


def runfiles():
    """Where the programs of this benchmark are, under `bazel run`, in a test and started by hand."""
    for folder in (os.getcwd(), os.path.abspath(sys.argv[0]) + ".runfiles/lockstep",
                   os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bazel-bin")):
        if os.path.exists(os.path.join(folder, "tools/bench/collective_times")):
            return folder
    sys.exit("collectives: tools/bench/collective_times is not built: bazel run //tools/bench:collectives")


def sizes(args):
    found, size = [], args.min_bytes
    while size < args.max_bytes:
        found.append(size)
        size *= 8
    return found + [args.max_bytes]


def last_json(name, command):
    done = subprocess.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        sys.stderr.write(done.stdout + done.stderr)
        sys.exit(f"collectives: {name} failed: {' '.join(command)}")
    return json.loads(lines[-1])


class Runner:
    def __init__(self, args):
        self.args = args
        self.program = os.path.join(runfiles(), "tools/bench/collective_times")
        self.peers = os.path.join(os.path.dirname(os.path.realpath(__file__)), "peers")
        self.python = args.python
        if "gloo" in args.contestants and not self.python:
            made = subprocess.run([os.path.join(self.peers, "environment")], stdout=subprocess.PIPE, text=True)
            if made.returncode != 0:
                sys.exit("collectives: --contestants=ours,busy does without PyTorch")
            self.python = made.stdout.strip()

    def __call__(self, contestant, ranks):
        a = self.args
        common = [f"--ranks={ranks}", f"--samples={a.samples}"]
        if contestant == "gloo":
            return last_json("gloo", [self.python, os.path.join(self.peers, "collectives.py"), *common,
                                      "--sizes=" + ",".join(str(size) for size in sizes(a))])
        common += [f"--min_bytes={a.min_bytes}", f"--max_bytes={a.max_bytes}"]
        if contestant == "busy":
            common += ["--busy", f"--busy_bytes={a.busy_bytes}", f"--compute_ms={a.compute_ms}"]
        return last_json(contestant, [self.program, *common])


def bus_bandwidth(kind, size, ranks, seconds):
    """Bytes a second as nccl-tests counts them: github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    return (2 if kind == "AllReduce" else 1) * (ranks - 1) / ranks * size / seconds


def call_rows(medians, ranks):
    """medians: seconds by (who, kind, bytes)."""
    rows = [["", "bytes", "ours us", "busbw GB/s", "any tensor", "MPI", "memcpy", "Gloo", "of memcpy", "of MPI", "of Gloo"]]
    for kind in KINDS:
        for size in sorted({size for _, found, size in medians if found == kind}):
            def us(who):
                return medians.get((who, kind, size), float("nan")) * 1e6
            ours = us("lockstep")
            rows.append([kind, str(size), f"{ours:.1f}", f"{bus_bandwidth(kind, size, ranks, ours / 1e6) / 1e9:.2f}"] +
                        ["-" if us(who) != us(who) else f"{us(who):.1f}" for who in ("any tensor", "mpi", "memcpy", "gloo")] +
                        ["-" if us(who) != us(who) or not us(who) else f"{ours / us(who):.3f}" for who in ("memcpy", "mpi", "gloo")])
    return rows


def overlap_rows(busy):
    rows = [["ranks compute", "computing ms", "transfer ms", "both ms", "longer ms", "of the transfer"]]
    for who, found in sorted(busy["overlap"].items()):
        compute, transfer, both = (found[key] * 1e3 for key in ("compute", "transfer", "both"))
        rows.append([who, f"{compute:.2f}", f"{transfer:.2f}", f"{both:.2f}", f"{both - compute:.2f}",
                     f"{(both - compute) / transfer:.2f}"])
    return rows


def late_rows(busy):
    rows = [["a rank is late", "others asleep ms", "others wait ms", "longer by"]]
    for who, found in sorted(busy["late"].items()):
        alone, waited = found["alone"] * 1e3, found["waited_for"] * 1e3
        rows.append([who, f"{alone:.2f}", f"{waited:.2f}", f"{waited / alone - 1:+.1%}"])
    return rows


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = rows[:1] + [["-" * width for width in widths]] + rows[1:]
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths))) for row in lines)


def collect(runs):
    """The medians of all rounds' samples."""
    samples = {}
    for run in runs:
        for entry in run.get("times", []):
            samples.setdefault((entry["who"], entry["what"], entry["bytes"]), []).extend(entry["seconds"])
    calls = {key: statistics.median(seconds) for key, seconds in samples.items()}
    busy = {"overlap": {}, "late": {}}
    for part, found in busy.items():
        pooled = {}
        for run in runs:
            for entry in run.get(part, []):
                for key, seconds in entry.items():
                    if isinstance(seconds, list):
                        pooled.setdefault(entry["who"], {}).setdefault(key, []).extend(seconds)
        for who, keys in pooled.items():
            found[who] = {key: statistics.median(seconds) for key, seconds in keys.items()}
    return calls, busy


def words(text):
    return [word for word in text.split(",") if word]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=words, default="2", help="numbers of ranks; default: %(default)s")
    p.add_argument("--contestants", type=words, default=",".join(CONTESTANTS), help="default: %(default)s")
    p.add_argument("--rounds", type=int, default=5, help="each contestant runs once a round; default: %(default)s")
    p.add_argument("--samples", type=int, default=10, help="of each call and round; default: %(default)s")
    p.add_argument("--min_bytes", type=int, default=1 << 10, help="of the whole buffer; default: %(default)s")
    p.add_argument("--max_bytes", type=int, default=32 << 20, help="in steps of 8 times; default: %(default)s")
    p.add_argument("--busy_bytes", type=int, default=25 << 20, help="all-reduced beside computing; default: %(default)s")
    p.add_argument("--compute_ms", type=float, default=40, help="computing beside it; default: %(default)s")
    p.add_argument("--python", default="", help="one that has PyTorch; default: peers/environment makes one")
    p.add_argument("--json", default="", help="file for everything measured")
    a = p.parse_args()
    for name in a.contestants:
        if name not in CONTESTANTS:
            p.error(f"there is no contestant {name}: take some of {', '.join(CONTESTANTS)}")
    json_path = os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", "."), a.json) if a.json else ""

    run = Runner(a)
    runs = {int(ranks): [] for ranks in a.ranks}
    for round_ in range(a.rounds):
        for ranks, found in runs.items():
            for contestant in a.contestants:
                found.append(run(contestant, ranks))
                print(f"round {round_ + 1} of {a.rounds}: {ranks} ranks, {contestant}", file=sys.stderr, flush=True)
    report = []
    for ranks, found in runs.items():
        calls, busy = collect(found)
        print(f"{ranks} ranks; medians of {a.rounds} rounds of {a.samples} calls on the slowest rank, in microseconds")
        if calls:
            print(table(call_rows(calls, ranks)) + "\n")
        if busy["overlap"]:
            print(table(overlap_rows(busy)) + "\n")
            print(table(late_rows(busy)) + "\n")
        report.append({"ranks": ranks, "busy": busy,
                       "calls": [{"who": who, "what": what, "bytes": size, "seconds": seconds,
                                  "busbw": bus_bandwidth(what, size, ranks, seconds)}
                                 for (who, what, size), seconds in sorted(calls.items())]})
    if json_path:
        with open(json_path, "w") as f:
            json.dump(report, f, indent=1)


if __name__ == "__main__":
    main()
