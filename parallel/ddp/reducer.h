#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/ddp/bucket.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/grad_hook.h"
#include "lockstep/parallel/step_timer.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::ddp {

// Averages gradients while backward runs: fills buckets as gradients arrive, starts all-reduces
// strictly in bucket order, so that all ranks issue the same, and waits for them at the end.
class Reducer {
 public:
  // `parameters` are those to reduce, in the model's order. `sync` tells whether a backward is to
  // communicate; `report` gets each step's statistics.
  Reducer(const std::vector<NamedTensor>& parameters, comm::Communicator& comm,
          const DdpOptions& options, std::function<bool()> sync,
          std::function<void(const StepStatistics&)> report);

 private:
  struct Place {
    size_t bucket = 0;
    size_t position = 0;  // among its indices
  };
  struct Launch {
    size_t pending = 0;  // gradients still to come
    comm::Work work;
  };

  void Accumulated(size_t index);
  void Begin();
  void Store(size_t index);
  void Finish();

  // Aborts the communicator, so that no rank waits for this one, and throws.
  [[noreturn]] void Fail(absl::Status status);

  comm::Communicator& comm_;
  const std::function<bool()> sync_;
  const std::function<void(const StepStatistics&)> report_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter

  bool running_ = false;          // between a backward's first gradient and its end
  std::vector<bool> stored_;      // by parameter
  std::vector<Launch> launches_;  // by bucket
  size_t next_ = 0;               // bucket to launch
  StepTimer timer_;
  std::vector<GradHook> hooks_;  // last: removed first
};

}  // namespace lockstep::parallel::ddp
