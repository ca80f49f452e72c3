#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

// Makes the strategy `name`, one of StrategyNames(), with its default options, for benchmarks and
// flags. `comm` may be null for "none". InvalidArgument, listing the names, for any other;
// collective, and may throw, like the strategies' constructors.
//
//   auto strategy = ValueOrThrow(parallel::MakeStrategy("fsdp", model.ptr(), comm));
absl::StatusOr<std::unique_ptr<Strategy>> MakeStrategy(const std::string& name,
                                                       std::shared_ptr<torch::nn::Module> model,
                                                       comm::Communicator* comm);

// "none", "manual", "ddp", "zero1", "zero2", "fsdp": by what ranks share out, the most last.
const std::vector<std::string>& StrategyNames();

}  // namespace lockstep::parallel
