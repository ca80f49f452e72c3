#!/usr/bin/env python3
"""Predicts the time of a training step under DDP, FSDP and hybrid sharding on 8 to 16,384 ranks, by simulation.

    tools/bazel run //tools/bench:scaling                              # a 7 B model on nodes with 4 GPUs
    tools/bazel run //tools/bench:scaling -- --network=mine.json --workload=mine.json --ranks=8,64,512
    tools/bazel run //tools/bench:scaling -- --check                   # measures here, and compares with real runs

NETWORK, with seconds and bytes: ranks_per_node; intra and inter, each {"alpha": of a message, "beta": of a byte}, where
inter's beta is that of a node's whole network, which its ranks share; steal: the part of a transfer's time that computing
ranks lose to it (0: it has engines of its own; 1: their cores move the bytes); tree: whether reduce-scatter and all-gather
may be done in log2 steps, too (all-reduce always may). Of a machine whose ranks may outnumber them: cores, and switch, what
a transfer waits longer for each further rank that shares a core. copies: by what factor a byte of an all_gather or
reduce_scatter costs more than one of an all-reduce (of which a ring moves twice as many).
WORKLOAD: parameters; param_bytes and grad_bytes, of one in a transfer; units, of equal size; bucket_bytes of DDP; forward,
backward and optimizer, seconds of one rank alone; jitter, a step's standard deviation over its mean.

MODEL. A transfer of n bytes among p ranks on N nodes takes the lesser of

    ring       2 (p-1) messages, 2 (p-1)/p n bytes for all-reduce; half of both for reduce-scatter and all-gather
    tree       2 log2(p) messages, and the same bytes

(R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005; the trees with full
bandwidth: P. Sanders, J. Speck, J. Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.)
Of a ring's messages, one for each node crosses the network; of a tree's, log2(N) do. A byte costs the slower of intra.beta
and inter.beta: with a ring through each of a node's ranks, the node's network is shared by them and used whole. Where s
ranks of a node transfer side by side, in groups of one rank a node, each has 1/s of it.

A rank has one stream that computes and one that transfers, in order. DDP all-reduces each bucket once backward has made it,
from the last parameter on. FSDP all-gathers each unit before forward and again before backward (the last stays), one
unit ahead, and reduce-scatters its gradients when they are there. Hybrid sharding does this within a node and all-reduces
the shard of the gradients across nodes. The optimizer works on the shard. What is stolen from computing is added.
A step lasts as long as its slowest rank: the expected largest of p normal variables, 1 + jitter sqrt(2 ln p) (see
F. Petrini, D. Kerbyson, S. Pakin: The Case of the Missing Supercomputer Performance, 2003, for what it does).
State of a rank: 16 bytes a parameter (f32 with its gradient and Adam's two moments), divided by the ranks that share it.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys

STRATEGIES = ("ddp", "fsdp", "hybrid")
# Perlmutter's GPU nodes (docs.nersc.gov/systems/perlmutter/architecture): four A100, each with NVLink to the others and with
# a 200 Gb/s port. Latencies of NCCL's protocols as in nccl's src/graph/tuning.cc; 80 % of the wires' bytes.
NETWORK = {"ranks_per_node": 4, "intra": {"alpha": 4e-6, "beta": 1 / 200e9}, "inter": {"alpha": 14e-6, "beta": 1 / 80e9},
           "steal": 0.05, "tree": False}
# Llama-2 7B (arXiv:2307.09288) in bf16, 4096 tokens a rank and step at 45 % of an A100's 312 TFLOP/s: 6 operations a
# parameter and token, a third of them in forward (arXiv:2001.08361). The optimizer moves 28 bytes a parameter at 1.5 TB/s.
WORKLOAD = {"parameters": 6.74e9, "param_bytes": 2, "grad_bytes": 2, "units": 32, "bucket_bytes": 25 << 20,
            "forward": 2 * 6.74e9 * 4096 / 140e12, "backward": 4 * 6.74e9 * 4096 / 140e12,
            "optimizer": 6.74e9 * 28 / 1.5e12, "jitter": 0.01}


def transfer(net, kind, size, ranks, per_node, sharing=1):
    """Seconds. per_node: ranks of the group on each node; sharing: groups that use a node's network at once."""
    if ranks <= 1 or size <= 0:
        return 0.0
    per_node = min(per_node, ranks)
    nodes = math.ceil(ranks / per_node)
    intra, inter = net["intra"], net["inter"]
    beta = max(intra["beta"] if per_node > 1 else 0.0, inter["beta"] * sharing if nodes > 1 else 0.0)
    passes = 2 if kind == "all_reduce" else 1
    moved = passes * (ranks - 1) / ranks * size * beta * net.get("copies", {}).get(kind, 1)
    across = nodes if nodes > 1 else 0
    ring = passes * (max(ranks - 1 - across, 0) * intra["alpha"] + across * inter["alpha"]) + moved
    if kind != "all_reduce" and not net["tree"]:
        return ring
    tree = passes * (math.ceil(math.log2(per_node)) * intra["alpha"] + math.ceil(math.log2(nodes)) * inter["alpha"]) + moved
    return min(ring, tree)


def crowding(net, ranks):
    """How much slower ranks are that outnumber their cores."""
    return max(1.0, ranks / net["cores"]) if net.get("cores") else 1.0


def crowded(net, seconds, slow):
    """A transfer among ranks that outnumber their cores: its last rank comes when the others have let it."""
    return seconds * slow + net.get("switch", 0.0) * (slow - 1)


def ddp(net, work, ranks):
    slow = crowding(net, ranks)
    forward, backward = work["forward"] * slow, work["backward"] * slow
    size = work["parameters"] * work["grad_bytes"]
    buckets = max(1, math.ceil(size / work["bucket_bytes"]))
    moving = transfer(net, "all_reduce", size / buckets, ranks, net["ranks_per_node"])
    each = crowded(net, moving, slow)
    end = 0.0
    for bucket in range(1, buckets + 1):
        end = max(end, forward + backward * bucket / buckets) + each
    computed = forward + backward
    return max(computed + net["steal"] * buckets * moving * slow, end) + work["optimizer"] * slow, buckets * each


def sharded(net, work, ranks, shards):
    """FSDP over `shards` ranks; ranks / shards copies of them, whose gradients are all-reduced."""
    slow = crowding(net, ranks)
    units, per_node = work["units"], net["ranks_per_node"]
    params = work["parameters"] * work["param_bytes"] / units
    grads = work["parameters"] * work["grad_bytes"] / units
    gathering = transfer(net, "all_gather", params, shards, per_node)
    scattering = transfer(net, "reduce_scatter", grads, shards, per_node)
    gather, scatter = crowded(net, gathering, slow), crowded(net, scattering, slow)
    replicas = ranks // shards
    if replicas > 1:
        reducing = transfer(net, "all_reduce", grads / shards, replicas, 1, sharing=min(shards, per_node))
        scattering, scatter = scattering + reducing, scatter + crowded(net, reducing, slow)
    forward, backward = work["forward"] * slow / units, work["backward"] * slow / units
    comm, computed, total = 0.0, [0.0, 0.0], 0.0
    for _ in range(units):  # forward; a gather may begin once the unit before the last is done with
        comm = max(comm, computed[-2]) + gather
        computed.append(max(computed[-1], comm) + forward)
        total += gather
    comm = max(comm, computed[-1])
    gathered = [comm]  # the last unit is still there
    scatters = []
    for unit in range(units):
        if unit + 1 < units:  # the next one's parameters before this one's gradients
            comm = max(comm, computed[-1]) + gather
            gathered.append(comm)
            total += gather
        computed.append(max(computed[-1], gathered[unit]) + backward)
        scatters.append(computed[-1])
        comm = max(comm, computed[-1]) + scatter
        total += scatter
    busy = (forward + backward) * units + net["steal"] * ((2 * units - 1) * gathering + units * scattering) * slow
    return max(comm, busy) + work["optimizer"] * slow / shards, total


def predict(net, work, strategy, ranks):
    """(seconds of a step, seconds of its transfers, ranks that share the state)"""
    if strategy == "ddp":
        shards, (step, moving) = 1, ddp(net, work, ranks)
    else:
        shards = ranks if strategy == "fsdp" else min(ranks, net["ranks_per_node"])
        step, moving = sharded(net, work, ranks, shards)
    return step * (1 + work["jitter"] * math.sqrt(2 * math.log(ranks))), moving, shards


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = rows[:1] + [["-" * width for width in widths]] + rows[1:]
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths))) for row in lines)


def predictions(net, work, counts):
    rows = [["strategy", "ranks", "step ms", "transfers ms", "efficiency", "state GB"]]
    alone = work["forward"] + work["backward"] + work["optimizer"]
    for strategy in STRATEGIES:
        for ranks in counts:
            step, moving, shards = predict(net, work, strategy, ranks)
            rows.append([strategy, f"{ranks:,}", f"{step * 1e3:,.1f}", f"{moving * 1e3:,.1f}", f"{alone / step:.3f}",
                         f"{16 * work['parameters'] / shards / 1e9:,.2f}"])
    return rows


# --- beside real runs --------------------------------------------------------------------------


def runfiles():
    """Where the programs of this benchmark are, under `bazel run`, in a test and started by hand."""
    for folder in (os.getcwd(), os.path.abspath(sys.argv[0]) + ".runfiles/lockstep",
                   os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bazel-bin")):
        if os.path.exists(os.path.join(folder, "tools/bench/train")):
            return folder
    sys.exit("scaling: tools/bench/train is not built: bazel run //tools/bench:scaling")


def last_json(program, *flags):
    command = [os.path.join(runfiles(), "tools/bench", program), *flags]
    done = subprocess.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        sys.stderr.write(done.stdout + done.stderr)
        sys.exit(f"scaling: {program} failed: {' '.join(command)}")
    return json.loads(lines[-1])


def measure_network(ranks, max_bytes, cores):
    """alpha and beta of an all-reduce: of the least, and of the largest less that; copies, of the largest of the others."""
    report = last_json("collective_times", f"--ranks={ranks}", "--samples=7", "--min_bytes=1024", f"--max_bytes={max_bytes}")
    times = {(entry["what"], entry["bytes"]): statistics.median(entry["seconds"]) for entry in report["times"]
             if entry["who"] == "lockstep"}
    sizes = sorted({size for _, size in times})
    least, most = (times["AllReduce", size] for size in (sizes[0], sizes[-1]))
    link = {"alpha": least / (2 * math.ceil(math.log2(ranks))),
            "beta": max(most - least, 1e-9) / (2 * (ranks - 1) / ranks * sizes[-1])}
    copies = {kind: times[what, sizes[-1]] / ((ranks - 1) / ranks * sizes[-1] * link["beta"])
              for kind, what in (("all_gather", "AllGather"), ("reduce_scatter", "ReduceScatter"))}
    return {"ranks_per_node": 1 << 30, "intra": link, "inter": link, "steal": 1.0, "tree": True, "cores": cores,
            "copies": copies, "switch": 0.0}


def fit(seconds, most):
    """The least number up to `most` from which on seconds(number), which grows with it, is not negative."""
    low = 0.0
    for _ in range(40):
        middle = (low + most) / 2
        low, most = (middle, most) if seconds(middle) < 0 else (low, middle)
    return low


def check(args):
    """Compute time of as many ranks as there are cores, each alone; the network between two; then the real runs. Ranks that
    outnumber their cores share them as the system pleases: switch is chosen so that DDP on two a core is right."""
    cores = args.cores or len(os.sched_getaffinity(0))
    common = [f"--model={args.model}", f"--steps={args.steps}", f"--warmup={max(1, args.steps // 8)}", f"--batch={args.batch}"]

    def run(ranks, strategy, comm):
        done = [last_json("train", f"--ranks={ranks}", f"--strategy={strategy}", f"--comm={comm}", *common)
                for _ in range(args.rounds)]
        print(f"{strategy}, {ranks} ranks, {'computing alone' if comm == 'null' else comm}", file=sys.stderr, flush=True)
        return {name: statistics.median(one[name] for one in done) for name, value in done[0].items()
                if isinstance(value, (int, float))}

    net = measure_network(2, run(1, "ddp", "null")["payload_bytes"], cores)
    rows = [["strategy", "ranks", "predicted ms", "measured ms", "error"]]
    for strategy in ("ddp", "fsdp"):
        computing = {ranks: run(ranks, strategy, "null") for ranks in sorted({min(cores, ranks) for ranks in args.ranks})}
        for ranks in args.ranks:
            alone = computing[min(cores, ranks)]
            # DDP has an all-reduce for each bucket. FSDP has three collectives for each unit, of all parameters three times.
            pieces = alone["collectives"] if strategy == "ddp" else alone["collectives"] // 3
            size = alone["payload_bytes"] // (1 if strategy == "ddp" else 3)
            work = {"forward": alone["forward_ms"] / 1e3, "backward": alone["backward_ms"] / 1e3,
                    # What each rank's optimizer takes for its own shard, of all parameters.
                    "optimizer": alone["optimizer_ms"] / 1e3 * (1 if strategy == "ddp" else min(cores, ranks)),
                    "parameters": size / 4, "param_bytes": 4, "grad_bytes": 4, "units": pieces,
                    "bucket_bytes": math.ceil(size / pieces), "jitter": 0}
            real = run(ranks, strategy, "mpi")["step_ms"]
            fitted = strategy == "ddp" and ranks == 2 * cores
            if fitted:
                net["switch"] = fit(lambda switch: predict(dict(net, switch=switch), work, strategy, ranks)[0] * 1e3 - real,
                                    real / 1e3)
            step = predict(net, work, strategy, ranks)[0] * 1e3
            rows.append([strategy, str(ranks), f"{step:.2f}", f"{real:.2f}", "fitted" if fitted else f"{step / real - 1:+.0%}"])
    print(f"{args.model}, batch {args.batch} a rank, {cores} cores; alpha {net['intra']['alpha'] * 1e6:.2f} us, "
          f"beta {net['intra']['beta'] * 1e9:.3f} ns a byte, switch {net['switch'] * 1e3:.2f} ms; medians of {args.rounds} runs")
    print(table(rows))


def read(path, defaults):
    if not path:
        return dict(defaults)
    with open(os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", "."), path)) as f:
        found = json.load(f)
    unknown = sorted(set(found) - set(defaults) - {"cores", "switch", "copies"})
    if unknown:
        sys.exit(f"scaling: {path} has no use for {', '.join(unknown)}; it may have {', '.join(defaults)}")
    return {**defaults, **found}


def counts(text):
    numbers = [int(word) for word in text.split(",") if word]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError("give numbers of ranks from 1 up")
    return numbers


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=counts, help="default: 8,16,...,16384; with --check 1,2,4,8")
    p.add_argument("--network", default="", help="JSON file; what it does not say is as in NETWORK above")
    p.add_argument("--workload", default="", help="JSON file; what it does not say is as in WORKLOAD above")
    p.add_argument("--check", action="store_true", help="measure alpha, beta and compute time here; compare with real runs")
    p.add_argument("--model", default="mlp", help="of --check; default: %(default)s")
    p.add_argument("--batch", type=int, default=64, help="of --check; default: %(default)s")
    p.add_argument("--steps", type=int, default=80, help="of each run of --check; default: %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="of --check; default: %(default)s")
    p.add_argument("--cores", type=int, default=0, help="of --check; default: those that this process may use")
    args = p.parse_args()
    if args.check:
        args.ranks = args.ranks or [1, 2, 4, 8]
        check(args)
        return
    net, work = read(args.network, NETWORK), read(args.workload, WORKLOAD)
    print(table(predictions(net, work, args.ranks or [8 << i for i in range(12)])))


if __name__ == "__main__":
    main()
