#!/usr/bin/env python3
"""Gloo's collectives, as torch.distributed gives them, on local processes; what ../collectives.py runs.

Prints one line of JSON: {"times": [{"who": "gloo", "what": "AllReduce", "bytes": 1024, "seconds": [...]}, ...]},
the seconds of each call, on the slowest rank. Calls are timed as those of ../collective_measure.cc.
"""
import argparse
import json
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BATCHED_BYTES, BATCH = 64 << 10, 20  # as in ../collective_measure.h


def calls(size, ranks):
    count = size // 4 // ranks * ranks
    whole, part = torch.zeros(count), torch.zeros(count // ranks)
    return {
        "AllReduce": lambda: dist.all_reduce(whole),
        "ReduceScatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "AllGather": lambda: dist.all_gather_into_tensor(whole, part),
    }


def measure(call, size, samples):
    seconds = []
    batch = BATCH if size <= BATCHED_BYTES else 1
    for sample in range(-2, samples):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        if sample >= 0:
            seconds.append((time.perf_counter() - start) / batch)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def run(rank, args, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks)
    times = []
    for size in args.sizes:
        for name, call in calls(size, args.ranks).items():
            times.append({"who": "gloo", "what": name, "bytes": size, "seconds": measure(call, size, args.samples)})
    if rank == 0:
        print(json.dumps({"times": times}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], required=True)
    parser.add_argument("--samples", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
