#include "lockstep/parallel/unit.h"

#include <algorithm>
#include <unordered_set>

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

std::vector<NamedUnit> FindUnits(torch::nn::Module& model) {
  std::unordered_set<torch::nn::Module*> seen;
  std::vector<NamedUnit> units;
  Visit(model, "", seen, units);
  return units;
}

}  // namespace lockstep::parallel
