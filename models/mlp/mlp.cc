#include "lockstep/models/mlp/mlp.h"

#include <ATen/ops/flatten.h>
#include <ATen/ops/relu.h>

namespace lockstep::models {

MlpImpl::MlpImpl(const MlpOptions& options)
    : first_(options.inputs, options.width),
      second_(options.width, options.width),
      third_(options.width, options.classes) {
  register_module("1", first_);
  register_module("3", second_);
  register_module("5", third_);
}

at::Tensor MlpImpl::forward(at::Tensor images) {
  at::Tensor hidden = at::relu(first_(at::flatten(images, /*start_dim=*/1)));
  hidden = at::relu(second_(hidden));
  return third_(hidden);
}

}  // namespace lockstep::models
