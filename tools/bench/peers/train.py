"""PyTorch's own strategies on CPU (Gloo), timed step by step: the peer to beat.

  python train.py --strategy ddp --model mlp --ranks 2 --data DIR      (one JSON line from rank 0)

Prints step milliseconds (forward, loss, backward, optimizer; median, 10th and 90th percentile), the peak resident
memory of rank 0 and its loss at every step, under the names that tools/bench:train has for them.
"""
import argparse
import json
import os
import resource
import statistics
import time

START = time.time()
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import workload


def run(rank, a):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(a.port), RANK=str(rank), WORLD_SIZE=str(a.ranks))
    torch.set_num_threads(a.threads)
    if a.ranks > 1 or a.strategy != "none":
        dist.init_process_group("gloo", rank=rank, world_size=a.ranks)
    x, y = workload.load(a.data)
    net = workload.model(a.model)
    if a.strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel
        size = dict(bucket_cap_mb=a.bucket_bytes / 2**20) if a.bucket_bytes else {}
        net = DistributedDataParallel(net, gradient_as_bucket_view=True, **size)
    elif a.strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (a.ranks,))
        for block in getattr(net, "blocks", []):
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    opt = (torch.optim.SGD(net.parameters(), lr=0.01) if a.optimizer == "sgd"
           else torch.optim.AdamW(net.parameters(), lr=1e-3, fused=a.fused))
    times, losses, first = [], [], None
    for step in range(a.steps):
        lo = ((step * a.ranks + rank) * a.batch) % (len(x) - a.batch)
        xb, yb = x[lo:lo + a.batch], y[lo:lo + a.batch]
        t = time.perf_counter()
        opt.zero_grad()
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        if a.strategy == "manual":
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= a.ranks
        opt.step()
        times.append(time.perf_counter() - t)
        losses.append(loss.item())
        first = first or time.time() - (a.started_at or START)
    if rank == 0:
        deciles = statistics.quantiles([t * 1e3 for t in times[a.warmup:]], n=10, method="inclusive")
        print(json.dumps(dict(peer="pytorch " + torch.__version__, strategy=a.strategy, model=a.model, ranks=a.ranks,
                              batch=a.batch, threads=a.threads, optimizer=a.optimizer, step_ms=deciles[4],
                              step_ms_p10=deciles[0], step_ms_p90=deciles[8], start_to_first_step_s=first,
                              peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                              losses=losses)))
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--strategy", choices=["none", "manual", "ddp", "fsdp"], default="ddp")
    p.add_argument("--model", choices=["mlp", "convnet", "vit", "vit25m"], default="mlp")
    p.add_argument("--optimizer", choices=["sgd", "adamw"], default="adamw")
    p.add_argument("--fused", action="store_true", help="PyTorch's fused AdamW: its best on a CPU")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--warmup", type=int, default=10)
    p.add_argument("--bucket_bytes", type=int, default=0, help="of ddp; 0: PyTorch's default")
    p.add_argument("--started_at", type=float, default=0, help="Unix time when the run was started; 0: now")
    p.add_argument("--port", type=int, default=29511)
    p.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    a = p.parse_args()
    if a.ranks == 1:
        run(0, a)
    else:
        mp.spawn(run, (a,), nprocs=a.ranks)


if __name__ == "__main__":
    main()
