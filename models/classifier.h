#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lockstep::models {

// A model whose type was chosen when the program ran, for benchmarks and flags.
//
//   torch::manual_seed(1);  // the parameters are drawn from LibTorch's default generator
//   models::Classifier model = lockstep::ValueOrThrow(models::Create("vit"));
//   model.module->to(torch::kDouble);  // before a strategy wraps it
//   at::Tensor logits = model.forward(images);  // (B, 1, 28, 28) -> (B, 10)
struct Classifier {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(at::Tensor)> forward;  // Of the same module, hooks included; owns it.
};

// Makes the model `name`, one of Names(): "mlp", "convnet", "vit" (4.8 million parameters) or
// "vit25m" (25 million). INVALID_ARGUMENT, listing the names, for any other. With the same seed the
// parameters are those of the Python models in tools/bench/peers/workload.py.
absl::StatusOr<Classifier> Create(const std::string& name);

std::vector<std::string> Names();

}  // namespace lockstep::models
