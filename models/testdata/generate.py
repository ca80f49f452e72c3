"""Makes what models_test.cc compares with: PyTorch's own results for the models of the peer scripts.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 numpy safetensors
    VENV/bin/python models/testdata/generate.py

golden.json, for each model at full size, in float64: names and shapes of its state dict, logits, loss and the norm
of each gradient, with weights and images that fill() makes from a formula; and the sums of the weights that seed 0
draws (float32). For a small vit the same, its weights being in vit_small.safetensors as Python wrote them.
"""
import json
import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../tools/bench/peers"))
import workload  # noqa: E402

LABELS = [3, 0, 9]
IMAGES = 1000  # stream of the images; parameters have the streams 0, 1, ... in the order of their names


def uniform(stream, shape):
    """float64 in [0, 1), element by element the same in C++ (Uniform in models_test.cc)."""
    mask = np.uint64(0xFFFFFFFF)
    x = (np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(2654435761) +
         np.uint64(stream) * np.uint64(2246822519)) & mask
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(2246822519)) & mask
    x ^= x >> np.uint64(13)
    return torch.from_numpy(x.astype(np.float64) / 2.0**32).view(shape)


def fill(net):
    """Weights of usual size; those of norms are around 1."""
    with torch.no_grad():
        for stream, (name, p) in enumerate(sorted(net.named_parameters())):
            noise = uniform(stream, p.shape) - 0.5
            if p.dim() > 1:
                p.copy_(noise * (2 / math.sqrt(p.numel() // p.shape[0])))
            else:
                p.copy_(noise * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def results(net):
    logits = net(uniform(IMAGES, (len(LABELS), 1, 28, 28)))
    loss = F.cross_entropy(logits, torch.tensor(LABELS))
    loss.backward()
    return {
        "logits": logits.flatten().tolist(),
        "loss": loss.item(),
        "gradient_norms": {name: p.grad.norm().item() for name, p in net.named_parameters()},
    }


def main():
    golden = {}
    for name in ["mlp", "convnet", "vit"]:
        net = workload.model(name)
        seeded = {key: value.double().sum().item() for key, value in net.state_dict().items()}
        net.double()
        fill(net)
        golden[name] = {
            "shapes": {key: list(value.shape) for key, value in net.state_dict().items()},
            "seeded_sums": seeded,
            **results(net),
        }
    small = workload.Vit(dim=8, depth=2, heads=2).double()
    fill(small)
    save_file(small.state_dict(), os.path.join(HERE, "vit_small.safetensors"))
    golden["vit_small"] = results(small)
    with open(os.path.join(HERE, "golden.json"), "w") as f:
        json.dump(golden, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
