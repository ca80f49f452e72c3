#!/usr/bin/env python3
"""Trains the same models with Lockstep and with PyTorch in turn, and prints their step times side by side.

    tools/bazel run //tools/bench:training -- --models=mlp,vit --ranks=2
    tools/bazel run //tools/bench:training -- --models=mlp --ranks=1,2,4 --bucket_mib=default,1,4 --json=/tmp/t.json

Contestants: ours; pytorch (DDP or FSDP2 over Gloo, the fused optimizer); null, ours on a communicator that moves
nothing, which is the limit; serial, ours with all communication after backward. README.md explains the table.
"""
import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time

STEPS = {"mlp": 160, "convnet": 50, "vit": 24, "vit25m": 16}  # a run; a few seconds
CONTESTANTS = ("ours", "pytorch", "null", "serial")


def runfiles():
    """Where the programs of this benchmark are, under `bazel run`, in a test and started by hand."""
    for folder in (os.getcwd(), os.path.abspath(sys.argv[0]) + ".runfiles/lockstep",
                   os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bazel-bin")):
        if os.path.exists(os.path.join(folder, "tools/bench/train")):
            return folder
    sys.exit("training: tools/bench/train is not built: bazel run //tools/bench:training")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Runner:
    def __init__(self, args):
        self.args = args
        self.root = runfiles()
        self.peers = os.path.join(os.path.dirname(os.path.realpath(__file__)), "peers")
        self.python = None
        if "pytorch" in args.contestants:
            made = subprocess.run([os.path.join(self.peers, "environment")], stdout=subprocess.PIPE, text=True)
            if made.returncode != 0:
                sys.exit(1)
            self.python = made.stdout.strip()

    def __call__(self, contestant, model, ranks, bucket_mib):
        a = self.args
        steps = a.steps or STEPS[model]
        flags = [f"--model={model}", f"--ranks={ranks}", f"--steps={steps}", f"--warmup={a.warmup}",
                 f"--batch={a.batch}", f"--strategy={a.strategy}", f"--optimizer={a.optimizer}",
                 f"--threads={a.threads}", f"--data={a.data}", f"--started_at={time.time()}"]
        if bucket_mib != "default":
            flags.append(f"--bucket_bytes={int(float(bucket_mib) * 2**20)}")
        if contestant == "pytorch":
            command = [self.python, os.path.join(self.peers, "train.py"), "--fused", f"--port={free_port()}"]
        else:
            command = [os.path.join(self.root, "tools/bench/train"),
                       "--comm=" + {"ours": "mpi"}.get(contestant, contestant)]
        environment = dict(os.environ, OMP_NUM_THREADS=str(a.threads))
        done = subprocess.run(command + flags, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            sys.stderr.write(done.stdout + done.stderr)
            sys.exit(f"training: {contestant} failed: {' '.join(command + flags)}")
        return json.loads(lines[-1])


def of_rounds(rounds, value):
    """The median over the rounds of a function of a round; None where a contestant is missing."""
    try:
        return statistics.median(value(r) for r in rounds)
    except (KeyError, ZeroDivisionError):
        return None


def loss_difference(rounds, steps):
    """The largest relative difference between the contestants' losses in the first steps; null's are wrong."""
    worst = 0.0
    for r in rounds:
        losses = [run["losses"][:steps] for name, run in r.items() if name != "null"]
        for values in zip(*losses):
            if not all(abs(v) < float("inf") for v in values):
                return float("inf")
            worst = max(worst, (max(values) - min(values)) / max(abs(v) for v in values))
    return worst


COLUMNS = [
    ("ours ms", "{:.2f}", lambda r: r["ours"]["step_ms"]),
    ("p90", "{:.2f}", lambda r: r["ours"]["step_ms_p90"]),
    ("PyTorch ms", "{:.2f}", lambda r: r["pytorch"]["step_ms"]),
    ("ratio", "{:.3f}", lambda r: r["ours"]["step_ms"] / r["pytorch"]["step_ms"]),
    ("limit ms", "{:.2f}", lambda r: r["null"]["step_ms"]),
    ("of limit", "{:.3f}", lambda r: r["ours"]["step_ms"] / r["null"]["step_ms"]),
    ("serial ms", "{:.2f}", lambda r: r["serial"]["step_ms"]),
    ("comm. ms", "{:.2f}", lambda r: r["serial"]["exposed_ms"]),
    ("hidden", "{:.2f}", lambda r: (r["serial"]["step_ms"] - r["ours"]["step_ms"]) / r["serial"]["exposed_ms"]),
    ("RSS MiB", "{:.0f}", lambda r: r["ours"]["peak_rss_mib"]),
    ("PyTorch", "{:.0f}", lambda r: r["pytorch"]["peak_rss_mib"]),
    ("start s", "{:.2f}", lambda r: r["ours"]["start_to_first_step_s"]),
    ("PyTorch", "{:.2f}", lambda r: r["pytorch"]["start_to_first_step_s"]),
]


def table(cases):
    rows = [["model", "ranks", "bucket"] + [name for name, _, _ in COLUMNS]]
    for (model, ranks, bucket), rounds in cases.items():
        row = [model, str(ranks), bucket]
        for _, form, value in COLUMNS:
            median = of_rounds(rounds, value)
            row.append("-" if median is None else form.format(median))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths))) for row in rows)


def words(text):
    return [word for word in text.split(",") if word]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=words, default="mlp,convnet,vit", help="also vit25m; default: %(default)s")
    p.add_argument("--ranks", type=words, default="2", help="numbers of ranks; default: %(default)s")
    p.add_argument("--bucket_mib", type=words, default="default", help="DDP's bucket sizes; default: each one's own")
    p.add_argument("--strategy", choices=["ddp", "fsdp", "manual"], default="ddp")
    p.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    p.add_argument("--contestants", type=words, default=",".join(CONTESTANTS), help="default: %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="each contestant runs once a round; default: %(default)s")
    p.add_argument("--steps", type=int, default=0, help="a run, warm-up included; default: by model")
    p.add_argument("--warmup", type=int, default=8, help="steps that are not timed; default: %(default)s")
    p.add_argument("--batch", type=int, default=64, help="images a step and rank; default: %(default)s")
    p.add_argument("--threads", type=int, default=1, help="of a rank; default: %(default)s")
    p.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="folder of the IDX files")
    p.add_argument("--json", default="", help="file for everything measured")
    a = p.parse_args()
    for name in a.contestants:
        if name not in CONTESTANTS:
            p.error(f"there is no contestant {name}: take some of {', '.join(CONTESTANTS)}")
    for name in a.models:
        if name not in STEPS:
            p.error(f"there is no model {name}: take some of {', '.join(STEPS)}")
    json_path = os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", "."), a.json) if a.json else ""

    run = Runner(a)
    cases = {}
    for round_ in range(a.rounds):
        for case in itertools.product(a.models, [int(n) for n in a.ranks], a.bucket_mib):
            runs = {}
            for contestant in a.contestants:
                runs[contestant] = run(contestant, *case)
                print(f"round {round_ + 1} of {a.rounds}: {case[0]}, {case[1]} ranks, {contestant}: "
                      f"{runs[contestant]['step_ms']:.2f} ms", file=sys.stderr, flush=True)
            cases.setdefault(case, []).append(runs)
    print(table(cases))

    worst = max(loss_difference(rounds, steps=10) for rounds in cases.values())
    print(f"\n{a.strategy}, {a.optimizer}, batch {a.batch} a rank, {a.threads} thread(s) a rank; medians over "
          f"{a.rounds} rounds of the runs' median steps.\n"
          f"losses of the first 10 steps: within a relative {worst:.1e} of each other")
    if json_path:
        with open(json_path, "w") as f:
            json.dump([dict(model=m, ranks=n, bucket_mib=b, rounds=r) for (m, n, b), r in cases.items()], f, indent=1)
    if not worst <= 1e-3:
        sys.exit("training: the contestants' losses differ: they did not train the same")


if __name__ == "__main__":
    main()
