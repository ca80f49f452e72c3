#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/data/loader.h"
#include "lockstep/parallel/checkpoint/state.h"
#include "lockstep/parallel/fsdp/fsdp_options.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/parallel/testing/test_models.h"

namespace lockstep::parallel::checkpoint::testing {

struct TrainingOptions {
  std::string strategy = "ddp";
  std::optional<FsdpOptions> fsdp;  // instead of `strategy`
  at::ScalarType dtype = at::kDouble;
  int64_t rows = 36;          // of the data set
  int64_t global_batch = 12;  // of all ranks together
  double dropout = 0;         // of the inputs, drawn by a generator of each rank's own
};

// One model for each rank, all different, and others for another seed. Not on the ranks' threads:
// they share LibTorch's generator.
std::vector<parallel::testing::OddNet> MakeNets(int size, uint64_t seed);

// One rank of a small training that has all that a checkpoint must bring back: AdamW, a schedule
// of learning rates, dropout, a shuffled stream of rows.
class Training {
 public:
  Training(comm::Communicator& comm, const parallel::testing::OddNet& net, TrainingOptions options);

  // One step; the mean loss over the global batch.
  double Step();

  // With the loader's position in it.
  State& state();

  // Goes to the position that a Load brought.
  void Seek();

  // Rows that this rank has seen since the epoch began that it is in.
  const std::vector<int64_t>& seen() const { return seen_; }

  const Strategy& strategy() const { return *strategy_; }

 private:
  const TrainingOptions options_;
  comm::Communicator& comm_;
  parallel::testing::OddNet net_;
  at::Generator generator_;
  data::Loader loader_;
  std::unique_ptr<Strategy> strategy_;
  std::optional<optim::FusedAdamW> optimizer_;
  std::optional<torch::optim::StepLR> schedule_;
  State state_;
  std::vector<int64_t> seen_;
};

// Model and optimizer put together from the ranks' parts, by name.
class WholeState {
 public:
  // Adds what this rank keeps. Collective, and for ranks that are threads.
  void Add(Training& training, comm::Communicator& comm);

  // The name of a tensor that the two do not have alike, bit for bit; "" where there is none.
  std::string DifferenceFrom(const WholeState& other) const;

  size_t size() const { return tensors_.size(); }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
};

}  // namespace lockstep::parallel::checkpoint::testing
