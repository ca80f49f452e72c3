#!/usr/bin/env python3
"""Times saving and loading checkpoints, bare files of the same bytes, and torch.distributed.checkpoint.

    tools/bazel run //tools/bench:checkpoints
    tools/bazel run //tools/bench:checkpoints -- --contestants=ours --layers=8 --json=/tmp/c.json

Contestants: ours (with bare files and memcpy, in the same processes); torch. README.md explains the table.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

CONTESTANTS = ("ours", "torch")


def runfiles():
    """Where the programs of this benchmark are, under `bazel run`, in a test and started by hand."""
    for folder in (os.getcwd(), os.path.abspath(sys.argv[0]) + ".runfiles/lockstep",
                   os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bazel-bin")):
        if os.path.exists(os.path.join(folder, "tools/bench/checkpoint_times")):
            return folder
    sys.exit("checkpoints: tools/bench/checkpoint_times is not built: bazel run //tools/bench:checkpoints")


def last_json(name, command):
    done = subprocess.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        sys.stderr.write(done.stdout + done.stderr)
        sys.exit(f"checkpoints: {name} failed: {' '.join(command)}")
    return json.loads(lines[-1])


class Runner:
    def __init__(self, args):
        self.args = args
        self.program = os.path.join(runfiles(), "tools/bench/checkpoint_times")
        self.peers = os.path.join(os.path.dirname(os.path.realpath(__file__)), "peers")
        self.python = args.python
        if "torch" in args.contestants and not self.python:
            made = subprocess.run([os.path.join(self.peers, "environment")], stdout=subprocess.PIPE, text=True)
            if made.returncode != 0:
                sys.exit("checkpoints: --contestants=ours does without PyTorch")
            self.python = made.stdout.strip()

    def __call__(self, contestant):
        with tempfile.TemporaryDirectory(dir=self.args.folder) as folder:
            common = [f"--ranks={self.args.ranks}", f"--layers={self.args.layers}",
                      f"--samples={self.args.samples}", f"--folder={folder}/bench"]
            if contestant == "torch":
                return last_json("torch", [self.python, os.path.join(self.peers, "checkpoints.py"), *common])
            return last_json("ours", [self.program, *common])


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = rows[:1] + [["-" * width for width in widths]] + rows[1:]
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths))) for row in lines)


def rows(medians, size):
    """medians: seconds by (contestant, what)."""
    found = [["", "ours ms", "MB/s", "bare ms", "of bare MB/s", "torch ms", "of torch MB/s"]]
    for what, bare in (("save", "write"), ("load", "read"), ("load, cold", "read, cold"), ("stall", "copy")):
        ours, plain = medians["ours", what], medians["ours", bare]
        torch = medians.get(("torch", what))
        found.append([what, f"{ours * 1e3:.0f}", f"{size / ours / 1e6:,.0f}", f"{plain * 1e3:.0f}",
                      f"{plain / ours:.2f}"] + (["-", "-"] if torch is None else
                                                [f"{torch * 1e3:.0f}", f"{torch / ours:.2f}"]))
    return found


def words(text):
    return [word for word in text.split(",") if word]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--contestants", type=words, default=",".join(CONTESTANTS), help="default: %(default)s")
    p.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    p.add_argument("--layers", type=int, default=32, help="12 MiB each; default: %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="each contestant runs once a round; default: %(default)s")
    p.add_argument("--samples", type=int, default=3, help="of each and round; default: %(default)s")
    p.add_argument("--folder", default="/tmp", help="where to write; default: %(default)s")
    p.add_argument("--python", default="", help="one that has PyTorch; default: peers/environment makes one")
    p.add_argument("--json", default="", help="file for everything measured")
    a = p.parse_args()
    for name in a.contestants:
        if name not in CONTESTANTS:
            p.error(f"there is no contestant {name}: take some of {', '.join(CONTESTANTS)}")
    if "ours" not in a.contestants:
        p.error("ours is what the others are compared with")
    json_path = os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", "."), a.json) if a.json else ""

    run = Runner(a)
    samples, size = {}, 0
    for round_ in range(a.rounds):
        for contestant in a.contestants:
            report = run(contestant)
            size = report["bytes"]
            for what, seconds in report["times"].items():
                samples.setdefault((contestant, what), []).extend(seconds)
            print(f"round {round_ + 1} of {a.rounds}: {contestant}", file=sys.stderr, flush=True)
    medians = {key: statistics.median(seconds) for key, seconds in samples.items()}
    print(f"{a.ranks} ranks, {size / (1 << 20):,.0f} MiB; medians of {a.rounds} rounds of {a.samples}, on the slowest rank")
    print(table(rows(medians, size)))
    if json_path:
        with open(json_path, "w") as f:
            json.dump({"ranks": a.ranks, "bytes": size,
                       "times": [{"who": who, "what": what, "seconds": seconds}
                                 for (who, what), seconds in sorted(samples.items())]}, f, indent=1)


if __name__ == "__main__":
    main()
