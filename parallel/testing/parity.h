#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::testing {

// A model under test: made anew for each rank and run, always with the same parameters.
struct ParityModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(at::Tensor)> forward;  // (B, ...) -> (B, classes)
};

// A training to be repeated under every strategy.
struct ParityCase {
  std::string name;                   // letters and digits
  std::function<ParityModel()> make;  // seeded by the caller
  std::vector<int64_t> sample_shape;  // of one input
  int64_t classes = 10;
  at::ScalarType dtype = at::kDouble;
  int steps = 5;
  int64_t batch = 3;     // a rank
  int micro_steps = 1;   // backwards a step, all but the last under NoSync()
  double clip_norm = 0;  // 0: no clipping
  bool sgd = false;      // else AdamW
};

// Whole tensors by name.
using NamedState = std::map<std::string, at::Tensor>;

// What a training came to.
struct Trajectory {
  std::vector<double> losses;         // of each step, over the global batch
  std::vector<double> norms;          // what ClipGradNorm returned
  std::vector<NamedState> gradients;  // of every second step, after clipping
  NamedState state;                   // parameters and buffers at the end
  NamedState optimizer;               // the optimizer's state, as "name/key"
};

// Makes a strategy for a model of one rank, with whatever options.
using StrategyFactory = std::function<std::unique_ptr<Strategy>(std::shared_ptr<torch::nn::Module>,
                                                                comm::Communicator&)>;

// Makes and seeds the case's model in its dtype. Ranks that are threads share LibTorch's default
// generator: make their models one after another.
ParityModel MakeModel(const ParityCase& c);

// Trains on rank `rank` of `size`: its part of the global batch of size * c.batch samples, which
// are functions of their index. `comm` averages the losses; null for one rank alone.
Trajectory Train(const ParityCase& c, const ParityModel& model, Strategy& strategy, int rank,
                 int size, comm::Communicator* comm);

// One process, the global batch of `size` ranks: what all strategies are compared with.
Trajectory TrainAlone(const ParityCase& c, int size);

// Where two trainings differ: losses, norms, gradients, the states at the end, compared to 1e-9 in
// f64, in f32 to a relative 1e-4. A line each; none where they agree.
std::vector<std::string> Differences(const Trajectory& found, const Trajectory& expected,
                                     at::ScalarType dtype);

// Reports differences as test failures that name `what`.
void ExpectSame(const Trajectory& found, const Trajectory& expected, at::ScalarType dtype,
                const std::string& what);

// The parity suite over ranks that are threads: each of `strategies` on each of `sizes` ranks
// equals one process.
void ExpectParityOnThreads(const ParityCase& c, const std::vector<std::string>& strategies,
                           const std::vector<int>& sizes);

// The same for strategies with options, by names for messages.
void ExpectParityOnThreadsOf(const ParityCase& c,
                             const std::map<std::string, StrategyFactory>& strategies,
                             const std::vector<int>& sizes);

}  // namespace lockstep::parallel::testing
