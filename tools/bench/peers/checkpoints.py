#!/usr/bin/env python3
"""torch.distributed.checkpoint under FSDP2, on local processes; what ../checkpoints.py runs.

Prints one line of JSON: {"bytes": ..., "times": {"save": [...], "stall": [...], "load": [...], "load, cold": [...]}},
the seconds of each call, on the slowest rank. The model is that of ../checkpoint_times.cc.
"""
import argparse
import json
import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH = 1024


def forget_files(folder):
    for root, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(root, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def run(rank, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.folder}/meet", rank=rank, world_size=args.ranks)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(args.layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, WIDTH)).sum().backward()
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    times = {}

    def timed(what, act):
        dist.barrier()
        start = time.perf_counter()
        result = act()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        times.setdefault(what, []).append(seconds.item())
        return result

    for sample in range(args.samples):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        folder = f"{args.folder}/sync{sample}"
        timed("save", lambda: dcp.save(state, checkpoint_id=folder))
        timed("stall", lambda: dcp.async_save(state, checkpoint_id=f"{args.folder}/async{sample}")).result()
        timed("load", lambda: dcp.load(state, checkpoint_id=folder))
        dist.barrier()
        forget_files(args.folder)
        timed("load, cold", lambda: dcp.load(state, checkpoint_id=folder))
        dist.barrier()
        if rank == 0:
            for name in ("sync", "async"):
                shutil.rmtree(f"{args.folder}/{name}{sample}")
        dist.barrier()
    if rank == 0:
        print(json.dumps({"bytes": 3 * 4 * args.layers * WIDTH * WIDTH, "times": times}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--folder", required=True)
    args = parser.parse_args()
    os.makedirs(args.folder)
    mp.spawn(run, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
