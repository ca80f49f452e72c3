#pragma once

#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <string>
#include <vector>

#include "lockstep/parallel/unit.h"

namespace lockstep::parallel::testing {

using Linear = Unit<torch::nn::LinearImpl>;

// A block with layers below it that are no Units, and one that is: (B, 15) -> (B, 15). Its shapes
// shard unevenly: (7, 15), (15, 7), 1 and numbers of elements below the number of ranks.
class OddBlockImpl : public torch::nn::Module {
 public:
  OddBlockImpl() {
    down = register_module("down", torch::nn::Linear(15, 7));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})));
    up = register_module("up", Linear(torch::nn::LinearOptions(7, 15).bias(false)));
    scale = register_parameter("scale", at::ones({1}));
  }
  at::Tensor forward(at::Tensor x) { return x + scale * up(at::tanh(norm(down(x)))); }

  torch::nn::Linear down = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  Linear up = nullptr;
  at::Tensor scale;
};
using OddBlock = Unit<OddBlockImpl>;

// A model of such blocks with parameters and a buffer of its own: (B, 17) -> (B, 5).
class OddNetImpl : public torch::nn::Module {
 public:
  explicit OddNetImpl(int blocks = 2) {
    in = register_module("in", torch::nn::Linear(17, 15));
    for (int i = 0; i < blocks; ++i) {
      this->blocks.push_back(register_module("block" + std::to_string(i), OddBlock()));
    }
    out = register_module("out", torch::nn::Linear(15, 5));
    offset = register_buffer("offset", at::ones({3}));
  }
  at::Tensor forward(at::Tensor x) {
    x = at::relu(in(x));
    for (OddBlock& block : blocks) x = block(x);
    return out(x) + offset.sum();
  }

  torch::nn::Linear in = nullptr;
  std::vector<OddBlock> blocks;
  torch::nn::Linear out = nullptr;
  at::Tensor offset;
};
using OddNet = Unit<OddNetImpl>;

// One for each rank, all different.
inline std::vector<OddNet> MakeNets(int size) {
  std::vector<OddNet> nets;
  for (int rank = 0; rank < size; ++rank) {
    torch::manual_seed(rank);
    nets.emplace_back(/*blocks=*/2);
  }
  return nets;
}

}  // namespace lockstep::parallel::testing
