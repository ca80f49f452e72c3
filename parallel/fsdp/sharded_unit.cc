#include "lockstep/parallel/fsdp/sharded_unit.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/operation.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::fsdp {

std::vector<FlatGroup> ShardParameters(const std::vector<NamedTensor>& parameters,
                                       ShardContext& context) {
  std::map<std::pair<bool, at::ScalarType>, std::vector<NamedTensor>> by_kind;
  for (const NamedTensor& parameter : parameters) {
    if (!comm::IsSupported(parameter.tensor.scalar_type())) {
      throw StatusError(absl::InvalidArgumentError(
          absl::StrCat("Fsdp: parameter ", parameter.name, " is of dtype ",
                       c10::toString(parameter.tensor.scalar_type()),
                       ", which communicators do not move: make it a buffer")));
    }
    const bool frozen = !parameter.tensor.requires_grad();
    by_kind[{frozen, parameter.tensor.scalar_type()}].push_back(parameter);
  }
  std::vector<FlatGroup> groups;
  for (auto& [kind, group] : by_kind) groups.emplace_back(std::move(group), context);
  return groups;
}

ShardedUnit::ShardedUnit(const NamedUnit& unit, std::vector<FlatGroup> groups, size_t index,
                         UnitEvents& events)
    : name_(unit.name), groups_(std::move(groups)) {
  pre_forward_ =
      unit.unit->AddPreForwardHook([&events, index](const std::vector<at::Tensor*>& inputs) {
        events.PreForward(index, inputs);
      });
  post_forward_ =
      unit.unit->AddPostForwardHook([&events, index](const std::vector<at::Tensor*>& outputs) {
        events.PostForward(index, outputs);
      });
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (!groups_[group].requires_grad()) {
      has_frozen_ = true;
      continue;
    }
    num_trainable_ += groups_[group].size();
    for (size_t i = 0; i < groups_[group].size(); ++i) {
      grad_hooks_.emplace_back(groups_[group].parameter(i).tensor,
                               [&events, index, group, i] { events.Accumulated(index, group, i); });
    }
  }
}

bool ShardedUnit::has_gradients() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const FlatGroup& group) { return group.has_gradients(); });
}

void ShardedUnit::StartUnshard() {
  if (state_ != State::kSharded) return;
  state_ = State::kGathering;
  for (FlatGroup& group : groups_) group.StartUnshard();
}

void ShardedUnit::FinishUnshard() {
  if (state_ != State::kGathering) return;
  for (FlatGroup& group : groups_) group.FinishUnshard();
  state_ = State::kUnsharded;
}

void ShardedUnit::Reshard(bool until_backward) {
  FinishUnshard();
  if (!until_backward) {
    for (FlatGroup& group : groups_) group.ForgetForward();
  }
  if (state_ == State::kSharded) return;
  for (FlatGroup& group : groups_) group.Reshard(until_backward);
  state_ = State::kSharded;
}

namespace {

// The Units around each parameter, outermost first, as indices; of the places where a parameter is
// registered, what they have in common.
class OwnerSearch {
 public:
  explicit OwnerSearch(const std::vector<NamedUnit>& units) {
    for (size_t i = 0; i < units.size(); ++i) index_[&units[i].unit->module()] = i;
  }

  void Visit(torch::nn::Module& module, std::vector<size_t> around) {
    const auto unit = index_.find(&module);
    if (unit != index_.end()) around.push_back(unit->second);
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      const void* key = parameter.value().unsafeGetTensorImpl();
      const auto [place, is_new] = chains_.emplace(key, around);
      if (is_new) continue;
      std::vector<size_t>& chain = place->second;
      const auto common = std::mismatch(chain.begin(), chain.end(), around.begin(), around.end());
      chain.erase(common.first, chain.end());
    }
    for (const auto& child : module.children()) Visit(*child, around);
  }

  size_t OwnerOf(const at::Tensor& parameter) const {
    return chains_.at(parameter.unsafeGetTensorImpl()).back();
  }

 private:
  std::unordered_map<const torch::nn::Module*, size_t> index_;
  std::unordered_map<const void*, std::vector<size_t>> chains_;
};

}  // namespace

absl::StatusOr<std::vector<std::vector<NamedTensor>>> AssignParameters(
    torch::nn::Module& model, const std::vector<NamedUnit>& units) {
  if (units.empty() || &units[0].unit->module() != &model) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the model (", model.name(),
        ") is no parallel::Unit, so its forward has no hooks: declare it as `using Net = "
        "parallel::Unit<NetImpl>` in the place of TORCH_MODULE(Net)"));
  }
  OwnerSearch search(units);
  search.Visit(model, {});
  std::vector<std::vector<NamedTensor>> owned(units.size());
  std::unordered_map<const void*, bool> seen;
  for (const auto& parameter : model.named_parameters()) {
    if (!seen.emplace(parameter.value().unsafeGetTensorImpl(), true).second) continue;
    owned[search.OwnerOf(parameter.value())].push_back({parameter.key(), parameter.value()});
  }
  return owned;
}

}  // namespace lockstep::parallel::fsdp
