#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

// Data parallelism by hand: an all-reduce of every gradient after backward, one at a time. It is
// what a first version of any distributed training does, and what Ddp is compared with.
//
//   parallel::Manual manual(model, comm);           // broadcasts rank 0's parameters
//   ...
//   loss.backward();
//   manual.FinishBackward();                        // here all communication happens
//
// A parameter that has no gradient on some rank counts as zero there, so that ranks agree on the
// order.
class Manual : public Strategy {
 public:
  Manual(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm);

  template <typename Impl>
  Manual(const torch::nn::ModuleHolder<Impl>& model, comm::Communicator& comm)
      : Manual(std::shared_ptr<torch::nn::Module>(model.ptr()), comm) {}

  std::string name() const override { return "manual"; }
  void FinishBackward() override;

 private:
  const std::unique_ptr<comm::Communicator> comm_;
};

}  // namespace lockstep::parallel
