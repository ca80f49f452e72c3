"""Makes python.safetensors, which safetensors_test.cc reads and writes again byte for byte.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 numpy safetensors
    VENV/bin/python parallel/checkpoint/testdata/generate.py
"""
import os

import torch
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    tensors = {}
    for name in ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
                 "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"]:
        tensors["a." + name] = torch.arange(3).to(getattr(torch, name))
    tensors["a.bool"] = torch.tensor([False, True, True])
    tensors["matrix"] = torch.arange(6, dtype=torch.float32).view(2, 3) / 4
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 3)
    tensors["größe \"x\""] = torch.tensor([-1], dtype=torch.int64)
    # One entry of metadata: the package writes several in an order that changes from run to run.
    save_file(tensors, os.path.join(HERE, "python.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
