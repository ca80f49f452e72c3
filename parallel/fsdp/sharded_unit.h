#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/fsdp/flat_group.h"
#include "lockstep/parallel/grad_hook.h"
#include "lockstep/parallel/unit.h"

namespace lockstep::parallel::fsdp {

// What the hooks of a Unit call; the Fsdp strategy.
class UnitEvents {
 public:
  virtual ~UnitEvents() = default;
  virtual void PreForward(size_t unit) = 0;
  virtual void PostForward(size_t unit, const std::vector<at::Tensor*>& outputs) = 0;
  virtual void Accumulated(size_t unit, size_t group, size_t parameter) = 0;
};

// A Unit and the parameters that are its own: its module's and those of modules below it, down to
// the next Units.
class ShardedUnit {
 public:
  // Groups `parameters` by dtype and requires_grad and shards them; hooks call `events` with
  // `index`.
  ShardedUnit(NamedUnit unit, const std::vector<NamedTensor>& parameters, size_t index,
              comm::Communicator& comm, UnitEvents& events);
  ShardedUnit(const ShardedUnit&) = delete;

  const std::string& name() const { return name_; }
  std::vector<FlatGroup>& groups() { return groups_; }

  bool has_frozen() const { return has_frozen_; }
  bool has_gradients() const;

  // Gathers all groups; waits with `wait`, which throws on errors, after issuing them all.
  void Unshard(BufferPool& pool,
               const std::function<comm::Work(comm::Work work, int64_t payload_bytes)>& track,
               const std::function<void(const comm::Work& work)>& wait);
  void Reshard(BufferPool& pool);

  // Gradients that are still to come in this backward.
  size_t pending = 0;
  bool in_backward = false;

  size_t num_trainable() const { return num_trainable_; }

 private:
  const std::string name_;
  std::vector<FlatGroup> groups_;
  size_t num_trainable_ = 0;  // parameters
  bool has_frozen_ = false;
  bool unsharded_ = false;
  HookHandle pre_forward_;
  HookHandle post_forward_;
  std::vector<GradHook> grad_hooks_;
};

// The parameters that each of the model's Units owns, in the order of FindUnits(model) and of the
// model; each parameter once: one that several Units use belongs to the innermost Unit around all
// of them. FailedPrecondition where the model itself is no Unit.
absl::StatusOr<std::vector<std::vector<NamedTensor>>> AssignParameters(
    torch::nn::Module& model, const std::vector<NamedUnit>& units);

}  // namespace lockstep::parallel::fsdp
