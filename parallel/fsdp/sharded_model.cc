#include "lockstep/parallel/fsdp/sharded_model.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <exception>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::fsdp {
namespace {

void CastTo(std::optional<at::ScalarType> dtype, const std::vector<at::Tensor*>& tensors) {
  if (!dtype) return;
  for (at::Tensor* tensor : tensors) {
    if (tensor->is_floating_point()) *tensor = tensor->to(*dtype);
  }
}

}  // namespace

ShardedModel::ShardedModel(torch::nn::Module& model, std::vector<std::vector<FlatGroup>> groups,
                           ShardContext& context, std::function<bool()> sync,
                           std::function<void(StepReader)> report)
    : context_(context), sync_now_(std::move(sync)), report_(std::move(report)) {
  const std::vector<NamedUnit> units = FindUnits(model);
  for (size_t i = 0; i < units.size(); ++i) {
    units_.push_back(std::make_unique<ShardedUnit>(units[i], std::move(groups[i]), i, *this));
  }
}

template <typename Body>
void ShardedModel::Guarded(const ShardedUnit* unit, Body body) {
  const auto fail = [&](absl::StatusCode code, const std::string& message) {
    const bool named = unit != nullptr && !unit->name().empty();
    const absl::Status status(
        code, named ? absl::StrCat("Unit \"", unit->name(), "\": ", message) : message);
    context_.world().Abort(status);
    throw StatusError(status);
  };
  const c10::InferenceMode normal(false);  // buffers outlive an evaluation
  const at::NoGradGuard no_grad;
  try {
    body();
  } catch (const StatusError& error) {
    fail(error.status().code(), std::string{error.status().message()});
  } catch (const std::exception& error) {
    fail(absl::StatusCode::kInternal, error.what());
  }
}

ShardedModel::Source ShardedModel::SourceOf(const at::Tensor& tensor) {
  if (tensor.grad_fn() != nullptr) return {tensor.grad_fn(), tensor.output_nr(), nullptr};
  return {nullptr, 0, tensor.unsafeGetTensorImpl()};
}

void ShardedModel::ThrowGone() {
  throw StatusError(absl::FailedPreconditionError(
      "backward: the Fsdp strategy that the forward ran under has been destroyed"));
}

void ShardedModel::BeginForward() {
  if (in_backward_) {
    throw StatusError(absl::FailedPreconditionError(
        "forward: the backward before it ended with an exception, so the ranks' gradients are "
        "incomplete: start again from the last good state with a new strategy"));
  }
  running_.clear();
  forward_order_.Begin();
  DropPrefetched();
  for (const auto& unit : units_) {
    // What a forward without a backward has gathered may have changed since.
    if (!up_to_date_) Free(*unit);
    for (FlatGroup& group : unit->groups()) {
      group.CheckRequiresGrad();
      group.UnblockGradients();
    }
  }
}

void ShardedModel::PreForward(size_t index, const std::vector<at::Tensor*>& inputs) {
  ShardedUnit& unit = *units_[index];
  Guarded(&unit, [&] {
    // Forwards inside backward recompute; some models call their Units and not the whole.
    if (index == 0 || (running_.empty() && !in_backward_)) BeginForward();
    Need(index);
  });
  const MixedPrecision& mixed = context_.options().mixed_precision;
  if (mixed.cast_inputs) CastTo(mixed.param, inputs);
  std::shared_ptr<Use> use;
  const bool from_inputs =
      absl::c_any_of(inputs, [](const at::Tensor* input) { return input->requires_grad(); });
  if (!from_inputs) {
    for (const Running& around : running_) {
      if (around.use != nullptr) around.use->ends_elsewhere = true;
    }
  }
  if (unit.has_frozen() && at::GradMode::is_enabled()) {
    use = std::make_shared<Use>();
    for (at::Tensor* input : inputs) {
      if (!input->requires_grad()) continue;
      ++use->inputs;
      if (input->is_leaf()) *input = input->view_as(*input);  // a leaf keeps its hooks for ever
      input->register_hook(
          [this, index, use, alive = std::weak_ptr<bool>(alive_)](const at::Tensor&) {
            if (!alive.expired()) InputDone(index, *use);
          });
    }
  }
  Running running = {.use = std::move(use)};
  for (const at::Tensor* input : inputs) running.inputs.push_back(SourceOf(*input));
  running_.push_back(std::move(running));
}

void ShardedModel::PostForward(size_t index, const std::vector<at::Tensor*>& outputs) {
  ShardedUnit& unit = *units_[index];
  const bool is_model = index == 0;
  const Running running = std::move(running_.back());
  running_.pop_back();
  bool backward_follows = false;
  if (at::GradMode::is_enabled()) {
    if (outputs.empty() && !unit.groups().empty()) {
      Guarded(&unit, [] {
        throw StatusError(absl::FailedPreconditionError(
            "its forward returns no tensor that hooks can see, so backward would find its "
            "parameters freed: see ForEachTensor in parallel/unit.h"));
      });
    }
    if (is_model) CastTo(context_.options().mixed_precision.output, outputs);
    for (at::Tensor* output : outputs) {
      if (!output->requires_grad()) continue;
      // An input that the Unit hands through: backward needs nothing of the Unit there.
      if (absl::c_linear_search(running.inputs, SourceOf(*output))) continue;
      backward_follows = true;
      if (output->is_leaf()) *output = output->view_as(*output);
      output->register_hook(
          [this, index, use = running.use, alive = std::weak_ptr<bool>(alive_)](const at::Tensor&) {
            if (alive.expired()) ThrowGone();
            PreBackward(index, use.get());
          });
    }
  } else if (is_model) {
    CastTo(context_.options().mixed_precision.output, outputs);
  }
  if (in_backward_) return;  // is being recomputed
  const FsdpOptions& options = context_.options();
  const bool stays =
      is_model || !options.reshard_after_forward || options.sharding != Sharding::kFull;
  if (!backward_follows || !stays) Free(unit, /*until_backward=*/backward_follows);
  if (!backward_follows && running_.empty()) context_.timer().End();  // an evaluation is no step
}

void ShardedModel::PreBackward(size_t index, Use* use) {
  ShardedUnit& unit = *units_[index];
  Guarded(&unit, [&] {
    EnterBackward(unit);
    // One without such inputs stays open to the end: backward ends in Units inside it.
    if (use != nullptr && use->backward != backwards_) {
      use->backward = backwards_;
      use->open = use->inputs;
      ++unit.open_uses;
    }
    Need(index);
  });
}

void ShardedModel::InputDone(size_t index, Use& use) {
  ShardedUnit& unit = *units_[index];
  if (!in_backward_ || use.backward != backwards_ || --use.open > 0 || use.ends_elsewhere) return;
  Guarded(&unit, [&] {
    --unit.open_uses;
    if (unit.pending == 0) ReshardAfterBackward(unit);
  });
}

void ShardedModel::Accumulated(size_t index, size_t group, size_t parameter) {
  ShardedUnit& unit = *units_[index];
  Guarded(&unit, [&] {
    EnterBackward(unit);
    // One Unit's gradients are being reduced while the next one's arrive, no more.
    while (!unit.has_gradients() && reduces_.size() > 1) FinishOldestReduce();
    unit.groups()[group].StoreGradient(parameter);
    if (--unit.pending == 0) PostBackward(unit);
  });
}

void ShardedModel::PostBackward(ShardedUnit& unit) {
  if (sync_ || context_.options().no_sync == NoSyncGradients::kReduced) {
    for (FlatGroup& group : unit.groups()) {
      if (!group.has_gradients()) continue;
      group.StartReduce();
      reduces_.push_back(&group);
    }
  }
  ReshardAfterBackward(unit);
}

void ShardedModel::ReshardAfterBackward(ShardedUnit& unit) {
  // Backward may still need a frozen parameter when the trainable ones have their gradients.
  if (unit.open_uses == 0 && !up_to_date_) Free(unit);
}

void ShardedModel::FinishOldestReduce() {
  FlatGroup* group = reduces_.front();
  reduces_.pop_front();
  group->FinishReduce();
}

// A hook of the unit fired: the first in this backward, or a later one.
void ShardedModel::EnterBackward(ShardedUnit& unit) {
  if (!std::exchange(in_backward_, true)) {
    ++backwards_;
    sync_ = sync_now_();
    const FsdpOptions& options = context_.options();
    up_to_date_ = !sync_ && options.no_sync == NoSyncGradients::kUnsharded &&
                  (!options.reshard_after_forward || options.sharding != Sharding::kFull);
    context_.timer().BeginBackward();
    AtEndOfBackward([this] { Guarded(nullptr, [this] { FinishBackward(); }); },
                    [this, alive = std::weak_ptr<bool>(alive_)] {
                      if (!alive.expired()) context_.world().Abort(AbandonedBackwardError());
                    });
    backward_order_.Begin();
    DropPrefetched();
    for (const auto& each : units_) {
      each->open_uses = 0;
      for (FlatGroup& group : each->groups()) group.UnblockGradients();
    }
  }
  if (!std::exchange(unit.in_backward, true)) {
    unit.pending = unit.num_trainable();
    for (FlatGroup& group : unit.groups()) group.BeginBackward();
  }
}

void ShardedModel::FinishBackward() {
  in_backward_ = false;
  for (const auto& unit : units_) {
    unit->in_backward = false;
    unit->pending = 0;
    unit->open_uses = 0;
    // Some of its parameters were not used: the others' gradients have waited for them.
    if (unit->has_gradients()) PostBackward(*unit);
  }
  while (!reduces_.empty()) FinishOldestReduce();
  DropPrefetched();
  for (const auto& unit : units_) {
    if (sync_) unit->held = false;
    if (!up_to_date_) Free(*unit);
    for (FlatGroup& group : unit->groups()) {
      group.FinishOffload();
      group.BlockGradients();
    }
  }
  context_.ClearPools();
  if (sync_) report_(context_.timer().End());
}

void ShardedModel::Need(size_t index) {
  ShardedUnit& unit = *units_[index];
  if (unit.groups().empty() || unit.is_unsharded()) return;
  const std::optional<size_t> next =
      (in_backward_ ? backward_order_ : forward_order_).Record(index);
  if (prefetched_ != index) DropPrefetched();
  prefetched_.reset();
  unit.StartUnshard();
  if (context_.options().prefetch && next && units_[*next]->is_sharded()) {
    units_[*next]->StartUnshard();
    prefetched_ = next;
  }
  unit.FinishUnshard();
}

void ShardedModel::DropPrefetched() {
  if (prefetched_) Free(*units_[*std::exchange(prefetched_, std::nullopt)]);
}

void ShardedModel::Free(ShardedUnit& unit, bool until_backward) {
  if (!unit.held) unit.Reshard(until_backward);
}

ShardedUnit& ShardedModel::Find(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& unit : units_) {
    if (unit->name() == name) return *unit;
    names.push_back(absl::StrCat("\"", unit->name(), "\""));
  }
  throw StatusError(absl::NotFoundError(
      absl::StrCat("the model has no Unit \"", name, "\", but ", absl::StrJoin(names, ", "))));
}

void ShardedModel::Unshard(const std::string& name, bool wait) {
  ShardedUnit& unit = Find(name);
  Guarded(&unit, [&] {
    // What a forward has gathered may have changed since.
    if (!std::exchange(unit.held, true)) unit.Reshard();
    unit.StartUnshard();
    if (wait) unit.FinishUnshard();
  });
}

void ShardedModel::Reshard(const std::string& name) {
  ShardedUnit& unit = Find(name);
  Guarded(&unit, [&] {
    unit.held = false;
    unit.Reshard();
  });
}

void ShardedModel::ReshardAll() {
  Guarded(nullptr, [&] {
    DropPrefetched();
    up_to_date_ = false;
    for (const auto& unit : units_) {
      unit->held = false;
      unit->Reshard();
      for (FlatGroup& group : unit->groups()) group.WaitForUpload();
    }
    context_.ClearPools();
  });
}

void ShardedModel::DropGradients() {
  for (const auto& unit : units_) {
    for (FlatGroup& group : unit->groups()) group.DropGradient();
  }
  context_.ClearPools();
}

void ShardedModel::UpdateFull(const std::function<at::Tensor(const std::string& name)>& find,
                              const Strategy::StateUpdater& update) {
  ReshardAll();
  Guarded(nullptr, [&] {
    for (const auto& unit : units_) {
      for (FlatGroup& group : unit->groups()) group.UpdateFull(find, update);
    }
  });
}

}  // namespace lockstep::parallel::fsdp
