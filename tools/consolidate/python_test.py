#!/usr/bin/env python3
"""A model goes from a checkpoint to PyTorch, and back, by names.

Needs a Python with torch, numpy and safetensors, and is run by name alone:

    tools/bazel test //tools/consolidate:python_test --test_env=LOCKSTEP_PEERS_PYTHON=VENV/bin/python
"""
import os
import re
import subprocess
import sys
import unittest

DATA = "/usr/share/datasets/fashion-mnist"
FOLDER = os.environ["TEST_TMPDIR"]
TRAIN = "tutorials/02_mnist_training/mnist_training"
DDP = "tutorials/07_mnist_ddp_multinode/mnist_ddp"

IN_PYTHON = """
import sys
sys.path.insert(0, "tools/bench/peers")
import torch, workload
from safetensors.torch import load_file, save_file
kind, given, made, data = sys.argv[1:]
net = {"mlp": workload.Mlp, "convnet": workload.ConvNet}[kind]()
net.load_state_dict(load_file(given), strict=True)
images, labels = workload.load(data, "t10k")
with torch.no_grad():
    loss = sum(torch.nn.functional.cross_entropy(net(images[i:i + 1000]), labels[i:i + 1000]).item() for i in range(0, 10000, 1000))
print("test loss %.4f" % (loss / 10))
save_file({name: 0.5 * value for name, value in net.state_dict().items()}, made)
net.load_state_dict(load_file(made))
with torch.no_grad():
    loss = sum(torch.nn.functional.cross_entropy(net(images[i:i + 1000]), labels[i:i + 1000]).item() for i in range(0, 10000, 1000))
print("test loss %.4f" % (loss / 10))
"""


def run(*words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise AssertionError("%s: status %d\n%s%s" % (" ".join(words), done.returncode, done.stdout, done.stderr))
    return done.stdout


def losses(text):
    return [float(loss) for loss in re.findall(r"test loss (\d+\.\d+)", text)]


class PythonTest(unittest.TestCase):
    def test_there_and_back(self):
        for kind, program in (("mlp", [DDP, "--ranks=2"]), ("convnet", [TRAIN])):
            checkpoint, weights, back = ["%s/%s-%s" % (FOLDER, kind, name) for name in ("run", "weights", "back")]
            ours = losses(run(*program, "--model=" + kind, "--epochs=1", "--steps=5", "--checkpoint_dir=" + checkpoint))
            run("tools/consolidate/consolidate", "--checkpoint=" + checkpoint, "--output=" + weights)
            there, halved = losses(run(os.environ["LOCKSTEP_PEERS_PYTHON"], "-c", IN_PYTHON, kind, weights, back, DATA))
            self.assertAlmostEqual(there, ours[-1], delta=2e-4)
            self.assertGreater(abs(halved - there), 1e-3)
            loaded, = losses(run(TRAIN, "--model=" + kind, "--epochs=0", "--load_weights=" + back))
            self.assertAlmostEqual(loaded, halved, delta=2e-4)


if __name__ == "__main__":
    if "LOCKSTEP_PEERS_PYTHON" not in os.environ:
        sys.exit("python_test: which Python? --test_env=LOCKSTEP_PEERS_PYTHON=/path/to/python")
    unittest.main()
