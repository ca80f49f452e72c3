#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/models/layers.h"
#include "lockstep/parallel/unit.h"

namespace lockstep::models {

// Small convolutional network for MNIST: 3x3 convolution to 32 channels, 3x3 to 64, 2x2 max-pool,
// 9216 -> 128 -> 10, with ReLU between. No dropout, so that runs can be compared.
//
//   models::ConvNet model;
//   at::Tensor logits = model(images);  // (B, 1, 28, 28) -> (B, 10)
//
// State dict: conv1, conv2, fc1 and fc2, each with weight and bias. Each layer is a Unit.
class ConvNetImpl : public torch::nn::Module {
 public:
  ConvNetImpl();

  at::Tensor forward(at::Tensor images);

 private:
  Conv2d conv1_;
  Conv2d conv2_;
  Linear fc1_;
  Linear fc2_;
};
using ConvNet = parallel::Unit<ConvNetImpl>;

}  // namespace lockstep::models
