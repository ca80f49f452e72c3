#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

#include "lockstep/models/layers.h"
#include "lockstep/parallel/unit.h"

namespace lockstep::models {

struct MlpOptions {
  int64_t inputs = 784;  // Elements of one image. Default: 28 x 28.
  int64_t width = 1024;  // Of both hidden layers. Default: 1024.
  int64_t classes = 10;  // Default: 10.
};

// Multi-layer perceptron: inputs -> width -> width -> classes, with ReLU between.
//
//   models::Mlp model;
//   at::Tensor logits = model(images);  // (B, ...), flattened to (B, inputs) -> (B, classes)
//
// State dict: 1.weight, 1.bias, 3.weight, 3.bias, 5.weight, 5.bias; these are the names in Python
// of nn.Sequential(Flatten, Linear, ReLU, Linear, ReLU, Linear). Each Linear is a Unit.
class MlpImpl : public torch::nn::Module {
 public:
  explicit MlpImpl(const MlpOptions& options = {});

  at::Tensor forward(at::Tensor images);

 private:
  Linear first_;
  Linear second_;
  Linear third_;
};
using Mlp = parallel::Unit<MlpImpl>;

}  // namespace lockstep::models
