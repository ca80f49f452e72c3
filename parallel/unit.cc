#include "lockstep/parallel/unit.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lockstep::parallel {

HookHandle::HookHandle(HookHandle&& other) noexcept
    : list_(std::move(other.list_)), id_(std::exchange(other.id_, 0)) {}

HookHandle& HookHandle::operator=(HookHandle&& other) noexcept {
  if (this != &other) {
    Remove();
    list_ = std::move(other.list_);
    id_ = std::exchange(other.id_, 0);
  }
  return *this;
}

HookHandle::~HookHandle() { Remove(); }

void HookHandle::Remove() {
  if (std::shared_ptr<HookList> list = list_.lock()) list->Remove(id_);
  list_.reset();
}

HookHandle HookList::Add(ForwardHook hook) {
  hooks_.emplace_back(next_id_, std::move(hook));
  return HookHandle(weak_from_this(), next_id_++);
}

void HookList::Remove(int64_t id) {
  hooks_.remove_if([id](const auto& hook) { return hook.first == id; });
}

void HookList::Run(const std::vector<at::Tensor*>& tensors) const {
  const auto hooks = hooks_;  // one may remove itself
  for (const auto& [id, hook] : hooks) hook(tensors);
}

void HookList::RunReversed(const std::vector<at::Tensor*>& tensors) const {
  const auto hooks = hooks_;
  for (auto hook = hooks.rbegin(); hook != hooks.rend(); ++hook) hook->second(tensors);
}

namespace {

void Visit(torch::nn::Module& module, const std::string& name,
           std::unordered_set<torch::nn::Module*>& seen, std::vector<NamedUnit>& units) {
  if (!seen.insert(&module).second) return;
  if (auto* unit = dynamic_cast<UnitModule*>(&module)) units.push_back({name, unit});
  for (const auto& child : module.named_children()) {
    const std::string& key = child.key();
    Visit(*child.value(), name.empty() ? key : absl::StrCat(name, ".", key), seen, units);
  }
}

}  // namespace

namespace {
thread_local UnitObserver* current_observer = nullptr;
}  // namespace

UnitObserverScope::UnitObserverScope(UnitObserver* observer)
    : outer_(std::exchange(current_observer, observer)) {}

UnitObserverScope::~UnitObserverScope() { current_observer = outer_; }

namespace internal {

void AnnounceUnit(UnitModule& unit) {
  if (current_observer != nullptr) current_observer->Built(unit);
}

void AnnounceUnits(torch::nn::Module& model) {
  if (current_observer == nullptr) return;
  const std::vector<NamedUnit> units = FindUnits(model);
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit)
    current_observer->Built(*unit->unit);
}

void ThrowNotRepeatable(const torch::nn::Module& module) {
  TORCH_CHECK(false, module.name(),
              "::forward cannot be run again in backward, as recomputation must: it takes a "
              "reference to what is not const, takes what cannot be copied, or returns a "
              "reference. Change its signature, or do not recompute this Unit");
}

}  // namespace internal

std::vector<NamedUnit> FindUnits(torch::nn::Module& model) {
  std::unordered_set<torch::nn::Module*> seen;
  std::vector<NamedUnit> units;
  Visit(model, "", seen, units);
  return units;
}

}  // namespace lockstep::parallel
