"""Records trainings under PyTorch's own DDP and FSDP2, which golden_test.cc follows.

    python3 -m venv VENV && VENV/bin/pip install -r tools/bench/peers/requirements.txt
    VENV/bin/python parallel/testing/golden/generate.py ddp fsdp2

Two processes over Gloo train the models of tools/bench/peers/workload.py in float64 for 20 steps, from the weights
of seed 0, on images and labels that a formula gives (uniform(), in C++ Uniform()). STRATEGY.json holds, for each
model: how it was trained, the loss of each step on each rank, and the sum and the 2-norm of each parameter at the end.
"""
import json
import math
import os
import socket
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../../tools/bench/peers"))
import workload  # noqa: E402

RANKS, STEPS, BATCH = 2, 20, 3
TRAININGS = {  # model: optimizer and its options
    "mlp": ("adamw", dict(lr=1e-3, weight_decay=0.1)),
    "convnet": ("sgd", dict(lr=0.02, momentum=0.9, weight_decay=1e-3)),
    "vit": ("adamw", dict(lr=3e-4, weight_decay=0.01)),
}


def uniform(stream, shape):
    """float64 in [0, 1), a function of the stream and the element's index."""
    mask = np.uint64(0xFFFFFFFF)
    x = (np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(2654435761) +
         np.uint64(stream) * np.uint64(2246822519)) & mask
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(2246822519)) & mask
    x ^= x >> np.uint64(13)
    return torch.from_numpy(x.astype(np.float64) / 2.0**32).view(shape)


def batch_of(step, rank):
    stream = 2 * (step * RANKS + rank)
    return uniform(stream, (BATCH, 1, 28, 28)), (uniform(stream + 1, (BATCH,)) * 10).long()


def wrap(strategy, net):
    if strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in getattr(net, "blocks", []):
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(strategy, model):
    net = workload.model(model).double()
    wrapped = wrap(strategy, net)
    name, options = TRAININGS[model]
    optimizer = (torch.optim.SGD if name == "sgd" else torch.optim.AdamW)(net.parameters(), **options)
    losses = []
    for step in range(STEPS):
        images, labels = batch_of(step, dist.get_rank())
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(images), labels)
        loss.backward()
        optimizer.step()
        everyones = [torch.empty_like(loss) for _ in range(RANKS)]
        dist.all_gather(everyones, loss.detach())
        losses.append([each.item() for each in everyones])
    full = {key: (p.full_tensor() if strategy == "fsdp2" else p).detach() for key, p in net.named_parameters()}
    return {
        "optimizer": name, **options, "ranks": RANKS, "batch": BATCH, "losses": losses,
        "parameters": {key: [p.sum().item(), p.norm().item()] for key, p in full.items()},
    }


def run(rank, strategy, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    trajectories = {model: train(strategy, model) for model in TRAININGS}
    if rank == 0:
        with open(os.path.join(HERE, f"{strategy}.json"), "w") as f:
            json.dump({"torch": torch.__version__, **trajectories}, f, indent=1)
            f.write("\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if not sys.argv[1:] or not set(sys.argv[1:]) <= {"ddp", "fsdp2"}:
        sys.exit(__doc__)
    for each in sys.argv[1:]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            free_port = s.getsockname()[1]
        mp.spawn(run, (each, free_port), nprocs=RANKS)
