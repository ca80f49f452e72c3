#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "lockstep/parallel/fsdp/flat_group.h"
#include "lockstep/parallel/grad_hook.h"
#include "lockstep/parallel/unit.h"

namespace lockstep::parallel::fsdp {

// What the hooks of a Unit call.
class UnitEvents {
 public:
  virtual ~UnitEvents() = default;
  virtual void PreForward(size_t unit, const std::vector<at::Tensor*>& inputs) = 0;
  virtual void PostForward(size_t unit, const std::vector<at::Tensor*>& outputs) = 0;
  virtual void Accumulated(size_t unit, size_t group, size_t parameter) = 0;
};

// The groups that `parameters` form, by dtype and requires_grad, trainable ones first. The order
// depends on nothing but what ranks have alike, so that all gather in one order.
std::vector<FlatGroup> ShardParameters(const std::vector<NamedTensor>& parameters,
                                       ShardContext& context);

// A Unit and the parameters that are its own: its module's and those of modules below it, down to
// the next Units.
class ShardedUnit {
 public:
  // Hooks call `events` with `index`.
  ShardedUnit(const NamedUnit& unit, std::vector<FlatGroup> groups, size_t index,
              UnitEvents& events);
  ShardedUnit(const ShardedUnit&) = delete;

  const std::string& name() const { return name_; }
  std::vector<FlatGroup>& groups() { return groups_; }

  size_t num_trainable() const { return num_trainable_; }  // parameters
  bool has_frozen() const { return has_frozen_; }
  bool has_gradients() const;

  // Issues the all-gathers, where the parameters are not gathered or on their way.
  void StartUnshard();
  void FinishUnshard();
  bool is_sharded() const { return state_ == State::kSharded; }
  bool is_unsharded() const { return state_ == State::kUnsharded; }

  // See FlatGroup. Parameters that stay whole count as out of date afterwards.
  void Reshard(bool until_backward = false);

  // The current backward.
  bool in_backward = false;
  size_t pending = 0;  // gradients that are still to come
  int open_uses = 0;   // forwards of a Unit with frozen parameters whose backward is under way

  // Gathered at the user's wish.
  bool held = false;

 private:
  enum class State { kSharded, kGathering, kUnsharded };

  const std::string name_;
  std::vector<FlatGroup> groups_;
  size_t num_trainable_ = 0;
  bool has_frozen_ = false;
  State state_ = State::kSharded;
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
