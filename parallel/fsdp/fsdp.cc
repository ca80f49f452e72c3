#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/core/grad_mode.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/fsdp/fsdp_build_scope.h"
#include "lockstep/parallel/fsdp/sharded_model.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

// Calls f(group, i) with each parameter of the groups, Unit by Unit.
template <typename Function>
void ForEachParameter(const fsdp::ShardedModel& sharded, Function f) {
  for (const auto& unit : sharded.units()) {
    for (fsdp::FlatGroup& group : unit->groups()) {
      for (size_t i = 0; i < group.size(); ++i) f(group, i);
    }
  }
}

std::unique_ptr<fsdp::ShardContext> Take(std::unique_ptr<fsdp::ShardContext>& context) {
  if (context == nullptr) {
    throw StatusError(absl::FailedPreconditionError(
        "the FsdpBuildScope has given its Units to another Fsdp: a scope builds one model"));
  }
  return std::move(context);
}

const void* KeyOf(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

// The Units' groups among those that were sharded while the model was built: none for a Unit that
// has other parameters now, whose groups give theirs back.
std::vector<std::vector<fsdp::FlatGroup>> TakeBuilt(
    const std::vector<std::vector<NamedTensor>>& owned,
    std::vector<std::vector<fsdp::FlatGroup>> built) {
  std::unordered_map<const void*, size_t> owner;
  for (size_t unit = 0; unit < owned.size(); ++unit) {
    for (const NamedTensor& parameter : owned[unit]) owner[KeyOf(parameter.tensor)] = unit;
  }
  std::vector<std::vector<fsdp::FlatGroup>> taken(owned.size());
  for (std::vector<fsdp::FlatGroup>& groups : built) {
    std::unordered_set<size_t> owners;
    size_t parameters = 0;
    bool fits = true;
    for (const fsdp::FlatGroup& group : groups) {
      parameters += group.size();
      for (size_t i = 0; i < group.size(); ++i) {
        const at::Tensor& parameter = group.parameter(i).tensor;
        const auto place = owner.find(KeyOf(parameter));
        if (place != owner.end()) owners.insert(place->second);
        fits = fits && place != owner.end() && parameter.requires_grad() == group.requires_grad();
      }
    }
    if (owners.empty()) continue;  // of a Unit that is not in the model
    const size_t unit = *owners.begin();
    if (fits && owners.size() == 1 && parameters == owned[unit].size()) {
      taken[unit] = std::move(groups);
    } else {
      for (fsdp::FlatGroup& group : groups) group.Restore();
    }
  }
  return taken;
}

// The names that the parameters have in the model.
void SetNames(fsdp::FlatGroup& group, const std::string& unit,
              const std::vector<NamedTensor>& owned) {
  std::unordered_map<const void*, std::string> names;
  for (const NamedTensor& parameter : owned) names[KeyOf(parameter.tensor)] = parameter.name;
  std::vector<std::string> ordered;
  for (size_t i = 0; i < group.size(); ++i) {
    ordered.push_back(names.at(KeyOf(group.parameter(i).tensor)));
  }
  group.SetNames(unit, ordered);
}

}  // namespace

Fsdp::Fsdp(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm, FsdpOptions options)
    : Fsdp(std::move(model), std::make_unique<fsdp::ShardContext>(comm, options), {}) {}

Fsdp::Fsdp(std::shared_ptr<torch::nn::Module> model, FsdpBuildScope& scope)
    : Fsdp(std::move(model), Take(scope.context_), std::move(scope.groups_)) {}

Fsdp::Fsdp(std::shared_ptr<torch::nn::Module> model, std::unique_ptr<fsdp::ShardContext> context,
           std::vector<std::vector<fsdp::FlatGroup>> built)
    : Strategy(std::move(model)), context_(std::move(context)) {
  const std::vector<NamedUnit> units = FindUnits(this->model());
  const auto owned = ValueOrThrow(fsdp::AssignParameters(this->model(), units));
  CheckSameModel(this->model(), context_->world());
  std::vector<std::vector<fsdp::FlatGroup>> groups = TakeBuilt(owned, std::move(built));
  if (context_->options().sync_module_states) {
    std::vector<std::string> in_step;
    for (size_t i = 0; i < units.size(); ++i) {
      if (groups[i].empty()) continue;
      for (const NamedTensor& parameter : owned[i]) in_step.push_back(parameter.name);
    }
    BroadcastModel(this->model(), context_->world(), in_step);
  }
  for (size_t i = 0; i < units.size(); ++i) {
    if (groups[i].empty()) groups[i] = fsdp::ShardParameters(owned[i], *context_);
    for (fsdp::FlatGroup& group : groups[i]) SetNames(group, units[i].name, owned[i]);
  }
  sharded_ = std::make_unique<fsdp::ShardedModel>(
      this->model(), std::move(groups), *context_, [this] { return sync(); },
      [this](StepReader read) { set_last_step(std::move(read)); });
  std::unordered_map<std::string, at::Tensor> slices;
  ForEachParameter(*sharded_, [&](const fsdp::FlatGroup& group, size_t i) {
    slices[group.parameter(i).name] = group.slice(i);
  });
  std::vector<NamedTensor> parameters = named_parameters();
  for (NamedTensor& parameter : parameters) parameter.tensor = slices.at(parameter.name);
  set_parameters(std::move(parameters));
}

Fsdp::~Fsdp() {
  if (sharded_ == nullptr) return;
  FindUnits(model())[0]
      .unit
      ->AddPreForwardHook([](const std::vector<at::Tensor*>&) {
        throw StatusError(
            absl::FailedPreconditionError("forward: the Fsdp that has sharded this model has been "
                                          "destroyed, and the weights with it"));
      })
      .Keep();
}

std::string Fsdp::name() const {
  switch (context_->options().sharding) {
    case Sharding::kFull:
      return "fsdp";
    case Sharding::kGradOp:
      return "zero2";
    case Sharding::kOptimizer:
      return "zero1";
  }
  return "";
}

at::Tensor Fsdp::SumOverShards(at::Tensor value) {
  at::Tensor sum = value.to(context_->world().device(), at::kDouble, /*non_blocking=*/false,
                            /*copy=*/true);
  ThrowIfError(context_->shard_untimed().AllReduce(sum, comm::ReduceOp::kSum).Wait());
  return sum.to(value.device(), value.scalar_type());
}

void Fsdp::UpdateState(const StateUpdater& update) {
  std::vector<NamedTensor> slices;
  ForEachParameter(*sharded_, [&](const fsdp::FlatGroup& group, size_t i) {
    slices.push_back({group.parameter(i).name, group.slice(i)});
  });
  UpdateFull(slices, update);
  at::NoGradGuard no_grad;
  for (const auto& buffer : model().named_buffers()) update(buffer.key(), buffer.value());
}

void Fsdp::UpdateFull(const std::vector<NamedTensor>& tensors, const StateUpdater& update) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const NamedTensor& each : tensors) by_name[each.name] = each.tensor;
  const auto find = [&](const std::string& name) {
    const auto place = by_name.find(name);
    return place == by_name.end() ? at::Tensor() : place->second;
  };
  sharded_->UpdateFull(find, update);
}

std::vector<StateShard> Fsdp::StateShards() {
  sharded_->ReshardAll();
  const comm::Communicator* replicas = context_->replicas();
  std::vector<StateShard> shards;
  ForEachParameter(*sharded_, [&](const fsdp::FlatGroup& group, size_t i) {
    shards.push_back({.name = group.parameter(i).name,
                      .sizes = group.parameter(i).tensor.sizes().vec(),
                      .offset = group.slice_offset(i),
                      .local = group.slice(i).detach(),
                      .replica = replicas == nullptr ? 0 : replicas->rank(),
                      .replicas = replicas == nullptr ? 1 : replicas->size(),
                      .trainable = group.requires_grad()});
  });
  for (const auto& buffer : model().named_buffers()) {
    const at::Tensor local = buffer.value().detach();
    shards.push_back({.name = buffer.key(),
                      .sizes = local.sizes().vec(),
                      .local = local.is_contiguous() ? local.view(-1) : local,
                      .replica = context_->world().rank(),
                      .replicas = context_->world().size()});
  }
  return shards;
}

void Fsdp::Unshard(const std::string& unit, bool wait) { sharded_->Unshard(unit, wait); }

void Fsdp::Reshard(const std::string& unit) { sharded_->Reshard(unit); }

void Fsdp::DropGradients() { sharded_->DropGradients(); }

}  // namespace lockstep::parallel
