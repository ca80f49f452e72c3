#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <utility>

#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

// No parallelism: one process trains on its own. What the other strategies are compared with, and
// what lets a loop written for a Strategy run without a communicator.
//
//   parallel::None none(model);
//   torch::optim::AdamW optimizer(none.parameters(), 1e-3);
class None : public Strategy {
 public:
  explicit None(std::shared_ptr<torch::nn::Module> model) : Strategy(std::move(model)) {}

  template <typename Impl>
  explicit None(const torch::nn::ModuleHolder<Impl>& model)
      : None(std::shared_ptr<torch::nn::Module>(model.ptr())) {}

  std::string name() const override { return "none"; }
};

}  // namespace lockstep::parallel
