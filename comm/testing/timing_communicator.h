#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "lockstep/comm/decorator.h"

namespace lockstep::comm::testing {

enum class Timing {
  kAsIs,
  // Operations are done at once and move nothing: what a step takes then is the limit for any
  // communication. Results are wrong, so switch to it after set-up and warm-up.
  kNothing,
  // Operations start when one of them is waited for, in the order of issue: nothing overlaps with
  // what the caller does between issue and wait. One that nobody waits for starts with the next.
  kDeferred,
};

// For benchmarks: a communicator whose operations, and those of all that is split from it, can be
// left out or held back while the program runs, to see what they cost and what hides them.
//
//   auto timing = std::make_shared<std::atomic<Timing>>(Timing::kAsIs);
//   TimingCommunicator comm(std::move(world), timing);
//   parallel::Ddp ddp(model, comm);                  // works on a Split of it
//   ...                                              // warm-up
//   *timing = Timing::kNothing;                      // on all ranks, with nothing under way
class TimingCommunicator : public Decorator {
 public:
  TimingCommunicator(std::unique_ptr<Communicator> inner,
                     std::shared_ptr<std::atomic<Timing>> timing);
  ~TimingCommunicator() override;

  absl::StatusOr<std::unique_ptr<Communicator>> Split(std::optional<int> color, int key) override;
  void StartAfter(const Work& work) override;
  Work Issue(Operation operation) override;

 private:
  class Queue;
  class DeferredState;

  const std::shared_ptr<Queue> queue_;
  const std::shared_ptr<std::atomic<Timing>> timing_;
};

}  // namespace lockstep::comm::testing
