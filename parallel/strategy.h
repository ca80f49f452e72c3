#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::parallel {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// A flat range of one parameter or buffer of the model, as one rank keeps it: what checkpoints are
// made of.
struct StateShard {
  std::string name;
  std::vector<int64_t> sizes;  // of the whole
  int64_t offset = 0;          // where `local` begins in the whole, flattened in row-major order
  at::Tensor local;  // 1-D, writable in place; empty where this rank has no part of it. A whole
                     // tensor that is not contiguous has its own shape.
  int replica = 0;   // of the ranks that keep this range, this one's number,
  int replicas = 1;  // and how many they are
  bool trainable = false;  // one of named_parameters()
};

// What a strategy did in its last step: from the first backward that synchronised to its end. On a
// GPU times are the device's: the host asks for a backward and has gone on before it begins.
struct StepStatistics {
  absl::Duration backward;  // time of backward on this rank, waiting included; ddp, fsdp
  // Time during which a collective of this strategy was under way; none where only `exposed` is
  // known: under ddp and fsdp on a GPU.
  std::optional<absl::Duration> communication = absl::ZeroDuration();
  // Of that, the time for which this rank waited: on a GPU, its stream of kernels.
  absl::Duration exposed;
  int64_t collectives = 0;  // of DDP the buckets, and what its header says beside them
  int64_t payload_bytes = 0;
};

// Gives them when they are asked for. Only that waits for the device.
using StepReader = std::function<StepStatistics()>;

// Common face of none, manual, ddp and fsdp, so that one training loop runs under any of them:
//
//   std::unique_ptr<Strategy> strategy = ...;       // takes the model and a communicator
//   torch::optim::AdamW optimizer(strategy->parameters(), 1e-3);
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     at::Tensor loss = cross_entropy(model(batch["images"]), batch["labels"]);
//     loss.backward();
//     strategy->FinishBackward();                   // none, ddp, fsdp: done already
//     strategy->ClipGradNorm(1.0);
//     optimizer.step();
//   }
//
// A strategy holds the model, changes it in place (hooks, gradients, FSDP: the parameters' memory),
// and works on a communicator of its own that it Splits from the given one; construction is
// collective. Losses are means over a rank's batch and gradients are averaged over ranks, so equal
// batches give what one process would compute on all of them together.
//
// ERRORS. Constructors, hooks in backward and everything here throw StatusError where a Status from
// the communicator or the model's shape demands it. The strategy's communicator has then been
// aborted: other ranks do not wait for this one.
class Strategy {
 public:
  virtual ~Strategy() = default;
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  // "none", "manual", "ddp", "fsdp", "zero2" or "zero1".
  virtual std::string name() const = 0;

  // What the optimizer is to update, in the model's order, under the parameters' names: the
  // parameters, or for FSDP this rank's 1-D slices of them. Build the optimizer after the strategy.
  const std::vector<NamedTensor>& named_parameters() const { return parameters_; }
  std::vector<at::Tensor> parameters() const;

  // Call after backward: afterwards the gradients of parameters() are averaged over the ranks.
  // Only manual has anything left to do then.
  virtual void FinishBackward() {}

  // While the returned scope lives, backward accumulates this rank's gradients without
  // communication; the first backward after it averages the sums. All ranks alike.
  class NoSyncScope {
   public:
    explicit NoSyncScope(Strategy& strategy) : strategy_(strategy), outer_(strategy.sync_) {
      strategy_.sync_ = false;
    }
    ~NoSyncScope() { strategy_.sync_ = outer_; }
    NoSyncScope(const NoSyncScope&) = delete;
    NoSyncScope& operator=(const NoSyncScope&) = delete;

   private:
    Strategy& strategy_;
    const bool outer_;
  };
  [[nodiscard]] NoSyncScope NoSync() { return NoSyncScope(*this); }

  // Scales the gradients so that their 2-norm over all parameters and ranks is at most `max_norm`;
  // returns what it was: () f64, on the gradients' device, so that nobody waits for a GPU before
  // asking for its item(). Collective under FSDP.
  at::Tensor ClipGradNorm(double max_norm);

  // Limits each element of the gradients to [-max_value, max_value]. No communication.
  void ClipGradValue(double max_value);

  // `value` itself where all ranks hold the same parameters(); where they hold shards, its sum over
  // the ranks that hold different ones, on the same device: for what must be known of all
  // gradients, such as a norm or whether any is infinite. Collective under FSDP.
  virtual at::Tensor SumOverShards(at::Tensor value) { return value; }

  // Calls `visit` with each parameter and buffer of the model: its name and full value, on every
  // rank, a shared one under its first name, in the model's order within a Unit, Unit by Unit, so
  // that FSDP never holds more than one of them in full. The tensor is good until `visit` returns.
  // Collective under FSDP; not between forward and backward.
  using StateVisitor = std::function<void(const std::string& name, const at::Tensor& full)>;
  virtual void VisitState(const StateVisitor& visit);

  // The same, and `update` may overwrite the values in place; all ranks must write the same.
  using StateUpdater = std::function<void(const std::string& name, at::Tensor full)>;
  virtual void UpdateState(const StateUpdater& update);

  // The same for tensors that lie as named_parameters() do, under their names: gradients, or an
  // optimizer's moments. `full` has the parameter's shape.
  virtual void UpdateFull(const std::vector<NamedTensor>& tensors, const StateUpdater& update);

  // What this rank keeps of the model's parameters and buffers, each once, without communication.
  // Under FSDP a parameter is on most ranks an empty range.
  virtual std::vector<StateShard> StateShards();

  // On a GPU the first call after a step waits until the device has done it. Training itself never
  // waits for these figures, so ask where the host waits anyway, as for a loss, or not at every
  // step.
  const StepStatistics& last_step() const;

 protected:
  // named_parameters() starts as the model's trainable parameters, each once. `comm`: of the ranks
  // that keep the whole model, each; null for one alone.
  explicit Strategy(std::shared_ptr<torch::nn::Module> model,
                    const comm::Communicator* comm = nullptr);

  torch::nn::Module& model() { return *model_; }
  bool sync() const { return sync_; }
  void set_parameters(std::vector<NamedTensor> parameters) { parameters_ = std::move(parameters); }
  void set_last_step(StepReader read) { read_last_step_ = std::move(read); }

 private:
  std::vector<at::Tensor> Gradients() const;  // of parameters(), those there are

  const std::shared_ptr<torch::nn::Module> model_;
  const int rank_;
  const int size_;
  std::vector<NamedTensor> parameters_;
  bool sync_ = true;
  mutable StepReader read_last_step_;  // null: last_step_ has it
  mutable StepStatistics last_step_;
};

// A communicator of the strategy's own, over the same ranks. Throws StatusError.
std::unique_ptr<comm::Communicator> SplitPrivate(comm::Communicator& comm);

// What of a model the ranks are to have alike, beside its names, dtypes, shapes, strides and
// requires_grad.
struct ModelCheck {
  std::vector<std::string> ignored;  // names of parameters and buffers to leave out; none
  std::vector<std::string> options;  // "bucket_bytes=1024": how each rank is to treat it; none
};

// FailedPrecondition (StatusError) on all ranks where their models differ; names the first option,
// parameter or buffer that does, and the ranks. Collective.
void CheckSameModel(torch::nn::Module& model, comm::Communicator& comm,
                    const ModelCheck& check = {});

// Copies rank `root`'s values of the model's parameters and buffers to all ranks, but for those
// that are ignored. Collective; the models must be the same.
void BroadcastModel(torch::nn::Module& model, comm::Communicator& comm,
                    const std::vector<std::string>& ignored = {}, int root = 0);

}  // namespace lockstep::parallel
