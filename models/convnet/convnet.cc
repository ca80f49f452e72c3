#include "lockstep/models/convnet/convnet.h"

#include <ATen/ops/flatten.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>

namespace lockstep::models {

ConvNetImpl::ConvNetImpl()
    : conv1_(torch::nn::Conv2dOptions(/*in_channels=*/1, /*out_channels=*/32, /*kernel_size=*/3)),
      conv2_(torch::nn::Conv2dOptions(/*in_channels=*/32, /*out_channels=*/64, /*kernel_size=*/3)),
      fc1_(64 * 12 * 12, 128),
      fc2_(128, 10) {
  register_module("conv1", conv1_);
  register_module("conv2", conv2_);
  register_module("fc1", fc1_);
  register_module("fc2", fc2_);
}

at::Tensor ConvNetImpl::forward(at::Tensor images) {
  at::Tensor hidden = at::relu(conv2_(at::relu(conv1_(images))));
  hidden = at::flatten(at::max_pool2d(hidden, /*kernel_size=*/2), /*start_dim=*/1);
  return fc2_(at::relu(fc1_(hidden)));
}

}  // namespace lockstep::models
