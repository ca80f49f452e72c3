#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/parallel/checkpoint/index.h"
#include "lockstep/parallel/optim/fused_optimizer.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::checkpoint {

// All that decides how a training goes on. Pointers are the caller's, and are read by Save and
// written by Load.
//
//   checkpoint::State state = {.strategy = &fsdp, .optimizer = &optimizer};
//   state.generators = {at::globalContext().defaultGenerator(at::kCPU)};  // which dropout uses
//   state.notes["position"] = data::ToString(loader.position());
struct State {
  Strategy* strategy = nullptr;  // Its model's parameters and buffers. Required.

  // Its state and its groups' learning rates. None: the model alone is saved or loaded.
  optim::FusedOptimizer* optimizer = nullptr;

  // How often each was stepped. Of what LibTorch's plateau scheduler keeps, only the learning rate
  // can be had, which is the optimizer's. Default: none.
  std::vector<torch::optim::LRScheduler*> schedulers = {};

  // This rank's, equally many on all ranks. On as many ranks as saved them, each rank's go on where
  // they were; on another number, each is seeded anew by rank 0's saved state and its own rank.
  // Default: none.
  std::vector<at::Generator> generators = {};

  // Whatever else is to come back, in UTF-8: a loader's position, GradScaler::SaveState(), the best
  // loss so far. Rank 0's are saved, and loaded on all ranks.
  // Default: none.
  std::map<std::string, std::string> notes = {};
};

// A range of a tensor of the state: what this rank keeps of it.
struct StateRange {
  std::string name;  // in the checkpoint: "model/fc1.weight", "optimizer/exp_avg/fc1.weight", ...
  TensorInfo whole;
  int64_t begin = 0;  // of `values` in the whole, flattened row by row
  at::Tensor values;  // of this rank; empty where it keeps nothing
  int replica = 0;    // of `replicas` ranks that keep this same range
  int replicas = 1;

  // The part that this rank is to write, so that each element is written once: elements of
  // `values`, flattened.
  struct Part {
    int64_t from = 0;
    int64_t count = 0;
  };
  Part part;
};

// "model/" and then names of the model.
inline constexpr char kModelPrefix[] = "model/";

std::vector<StateRange> ModelRanges(Strategy& strategy);

// Of one piece of the optimizer's state. `shards`: the strategy's, by name.
using ShardsByName = std::map<std::string, StateShard>;
ShardsByName TrainableShards(Strategy& strategy);
StateRange OptimizerRange(const optim::FusedOptimizer::State& state, const ShardsByName& shards,
                          int rank);

// "random/3/0": state of generator 0 of rank 3.
std::string GeneratorName(int rank, size_t index);

// How many steps a scheduler has made.
unsigned& StepsOf(torch::optim::LRScheduler& scheduler);

// All that rank `rank` keeps and is to write of `state`.
std::vector<StateRange> RangesToSave(const State& state, int rank);

}  // namespace lockstep::parallel::checkpoint
