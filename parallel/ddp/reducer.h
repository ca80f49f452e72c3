#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/ddp/bucket.h"
#include "lockstep/parallel/ddp/buffer_sync.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/grad_hook.h"
#include "lockstep/parallel/step_timer.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::ddp {

// Averages gradients while backward runs: copies each into its bucket when it has arrived, hands
// full buckets to the hook strictly in their order, so that all ranks issue the same, and waits for
// them at the end.
//
// What a backward issues, on every rank alike: under a Join the count of active ranks; the buffers;
// the buckets; which parameters were used (find_unused_parameters, and the first with
// static_graph); in the first, the order in which gradients arrived.
class Reducer {
 public:
  // `trainable` are the parameters to reduce, in the model's order; `frozen` those that are to stay
  // so. `sync` tells whether a backward is to communicate; `report` gets each step's statistics.
  Reducer(const std::vector<NamedTensor>& trainable, std::vector<NamedTensor> frozen,
          std::vector<at::Tensor> buffers, std::unique_ptr<comm::Communicator> comm,
          const DdpOptions& options, std::function<bool()> sync,
          std::function<void(StepReader)> report);

  // From now on each backward first learns which ranks take part in it, and with
  // `divide_by_active` averages over these alone. Join undoes it.
  void BeginJoin(bool divide_by_active);
  void EndJoin();

  // Takes part in a backward of the other ranks with gradients of zero, and without effect on this
  // rank's parameters. False, and nothing, where no rank runs one any more.
  bool Shadow();

  // Backwards of this rank that communicated; those of Shadow() apart.
  int64_t steps() const { return steps_; }

  comm::Communicator& comm() { return comm_; }

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    size_t bucket = 0;
    size_t position = 0;   // among the bucket's
    bool expected = true;  // to get a gradient; false with static_graph, where the first had none
    bool used = false;     // has one, in this backward
    bool stored = false;   // its bucket has what this rank contributes
    int64_t arrival = -1;  // of its gradient in the first backward
  };
  struct JoinState {
    bool divide_by_active = false;
    at::Tensor active;  // a 1 for each rank that runs backward
    int64_t count = 0;
    int root = 0;  // the first of them
  };

  void Accumulated(size_t index);
  void Begin(bool shadow);
  void CountActive(bool shadow);
  void CheckTrainable();
  void CheckGradient(const Parameter& parameter);
  void Store(Parameter& parameter);
  void StoreUnused(Parameter& parameter, bool shadow);
  void MarkStored(Parameter& parameter);
  void Finish(bool shadow);
  void FillUnused(bool shadow);
  void ShareUsed();
  void ShareOrder();
  void MakeBuckets(absl::Span<const size_t> order);

  int root() const { return join_ ? join_->root : 0; }

  // Whether this backward may leave any parameter out. static_graph learns from the first.
  bool finds_unused() const { return static_graph_ ? !recorded_ : find_unused_; }

  // Runs `body`, part of a hook, and fails with what it throws: no rank waits for this one then.
  template <typename Body>
  void Guarded(const std::string& where, Body body);

  StepTimer timer_;
  TimedCommunicator comm_;
  const std::vector<int64_t> bucket_limits_;
  const bool find_unused_;
  const bool static_graph_;
  const std::shared_ptr<CommHook> hook_;
  const std::function<bool()> sync_;
  const std::function<void(StepReader)> report_;
  const std::vector<NamedTensor> frozen_;
  std::vector<Parameter> parameters_;
  std::vector<size_t> order_;  // of parameters in buckets
  std::vector<Bucket> buckets_;
  BufferSync buffers_;
  std::optional<JoinState> join_;

  std::vector<size_t> next_order_;  // to be made at the next backward, or empty
  bool order_known_ = false;
  bool recorded_ = false;
  at::Tensor used_;  // by parameter, on any rank: 1 or 0
  int64_t steps_ = 0;
  absl::Status failure_;

  bool running_ = false;         // between a backward's first gradient and its end
  std::vector<size_t> pending_;  // gradients still to come, by bucket
  size_t next_ = 0;              // bucket to start
  int64_t arrivals_ = 0;

  const std::shared_ptr<bool> alive_ = std::make_shared<bool>();  // what outlives this asks it
  std::vector<GradHook> hooks_;                                   // last: removed first
};

}  // namespace lockstep::parallel::ddp
