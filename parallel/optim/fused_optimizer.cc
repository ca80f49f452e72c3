#include "lockstep/parallel/optim/fused_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel::optim {
namespace {

constexpr char kStep[] = "step";

std::string Describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "nothing";
  return absl::StrCat(c10::toString(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "]");
}

}  // namespace

std::vector<NamedTensor> NamedParameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> parameters;
  std::unordered_set<const void*> seen;
  for (const auto& each : module.named_parameters()) {
    if (each.value().requires_grad() && seen.insert(each.value().unsafeGetTensorImpl()).second) {
      parameters.push_back({each.key(), each.value()});
    }
  }
  return parameters;
}

FusedOptimizer::FusedOptimizer(const std::vector<NamedTensor>& parameters,
                               std::vector<GroupSpec> groups)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), groups.at(0).options->clone()) {
  std::vector<std::vector<at::Tensor>> members(groups.size());
  std::unordered_set<std::string> names;
  for (const auto& [name, parameter] : parameters) {
    TORCH_CHECK(parameter.defined(), "parameter ", name, " is undefined");
    TORCH_CHECK(names.insert(name).second, "two parameters have the name ", name);
    TORCH_CHECK(parameter.is_non_overlapping_and_dense(), "parameter ", name,
                " does not fill one piece of memory: its strides leave gaps or overlap");
    Slot slot = {.name = name, .parameter = parameter};
    for (size_t group = 1; group < groups.size(); ++group) {
      if (slot.group == 0 && groups[group].matches(name)) slot.group = group;
    }
    members[slot.group].push_back(parameter);
    for (size_t i = 0; i < groups[slot.group].state_keys.size(); ++i) {
      slot.states.push_back(at::zeros_like(parameter));
    }
    slots_.push_back(std::move(slot));
  }
  for (size_t group = 0; group < groups.size(); ++group) {
    TORCH_CHECK(group == 0 || !members[group].empty(), "the ", group,
                ". of the parameter groups matches none of the ", parameters.size(), " parameters");
    Optimizer::add_param_group(torch::optim::OptimizerParamGroup(std::move(members[group])));
    // Newer LibTorch (2.15 does, 2.11 not) drops options of a class it does not know.
    param_groups_.back().set_options(std::move(groups[group].options));
    state_keys_.push_back(std::move(groups[group].state_keys));
  }

  std::map<std::tuple<size_t, at::ScalarType, std::string>, size_t> places;
  for (size_t index = 0; index < slots_.size(); ++index) {
    const Slot& slot = slots_[index];
    const auto [place, is_new] = places.try_emplace(
        {slot.group, slot.parameter.scalar_type(), slot.parameter.device().str()}, batches_.size());
    if (is_new) batches_.emplace_back();
    batches_[place->second].slots.push_back(index);
  }
  for (Batch& batch : batches_) {
    const Slot& any = slots_[batch.slots[0]];
    batch.steps = at::zeros({static_cast<int64_t>(batch.slots.size())},
                            at::TensorOptions().dtype(at::kFloat).device(any.parameter.device()));
    for (Update* update : {&batch.first, &batch.later}) {
      update->group = any.group;
      update->first = update == &batch.first;
      update->states.resize(any.states.size());
    }
    for (size_t i = 0; i < batch.slots.size(); ++i) {
      slots_[batch.slots[i]].step = batch.steps.select(0, static_cast<int64_t>(i));
    }
  }
}

void FusedOptimizer::SetGradientScale(at::Tensor scale, at::Tensor found_inf) {
  for (const at::Tensor& each : {scale, found_inf}) {
    TORCH_CHECK(!each.defined() || (each.scalar_type() == at::kFloat && each.numel() == 1),
                "scale and found_inf are scalars in f32, and one of them is ", Describe(each));
  }
  scale_ = std::move(scale);
  found_inf_ = std::move(found_inf);
}

void FusedOptimizer::Add(Slot& slot, Update& update) {
  at::Tensor gradient = slot.parameter.grad();
  TORCH_CHECK(gradient.layout() == at::kStrided && gradient.sizes() == slot.parameter.sizes() &&
                  gradient.scalar_type() == slot.parameter.scalar_type() &&
                  gradient.device() == slot.parameter.device(),
              "the gradient of parameter ", slot.name, " is ", Describe(gradient), " on ",
              gradient.device(), ", the parameter ", Describe(slot.parameter), " on ",
              slot.parameter.device());
  // The kernels run over memory without a look at strides.
  if (gradient.strides() != slot.parameter.strides()) {
    gradient = at::empty_like(slot.parameter).copy_(gradient);
  }
  update.parameters.push_back(slot.parameter);
  update.gradients.push_back(std::move(gradient));
  update.steps.push_back(slot.step);
  for (size_t i = 0; i < slot.states.size(); ++i) update.states[i].push_back(slot.states[i]);
}

void FusedOptimizer::Clear(Update& update) {
  update.scale.reset();
  update.parameters.clear();
  update.gradients.clear();
  update.steps.clear();
  for (std::vector<at::Tensor>& states : update.states) states.clear();
}

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const trace::Span span("OPTIMIZER", "train");
  at::NoGradGuard no_grad;
  if (found_inf_.defined() && found_inf_.item<float>() != 0) return loss;
  for (Batch& batch : batches_) {
    for (Update* update : {&batch.first, &batch.later}) Clear(*update);  // after an exception
    for (size_t index : batch.slots) {
      Slot& slot = slots_[index];
      if (slot.parameter.grad().defined()) Add(slot, slot.started ? batch.later : batch.first);
    }
    if (batch.first.steps.size() + batch.later.steps.size() == batch.slots.size()) {
      batch.steps.add_(1);
    } else {
      for (Update* update : {&batch.first, &batch.later}) {
        for (at::Tensor& step : update->steps) step.add_(1);
      }
    }
    for (Update* update : {&batch.first, &batch.later}) {
      if (update->parameters.empty()) continue;
      if (scale_.defined()) update->scale = scale_;
      Apply(*update);
      Clear(*update);
    }
    for (size_t index : batch.slots) {
      if (slots_[index].parameter.grad().defined()) slots_[index].started = true;
    }
  }
  return loss;
}

std::vector<FusedOptimizer::State> FusedOptimizer::StateDict() const {
  std::vector<State> state;
  for (const Slot& slot : slots_) {
    state.push_back({slot.name, kStep, slot.step});
    for (size_t i = 0; i < slot.states.size(); ++i) {
      state.push_back({slot.name, state_keys_[slot.group][i], slot.states[i]});
    }
  }
  return state;
}

absl::Status FusedOptimizer::LoadStateDict(const std::vector<State>& state) {
  const auto what = [](const State& each) {
    return absl::StrCat(each.key, " of parameter ", each.parameter);
  };
  std::map<std::pair<std::string, std::string>, const State*> given;
  for (const State& each : state) {
    if (!given.emplace(std::make_pair(each.parameter, each.key), &each).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("the optimizer's state to load has ", what(each), " twice"));
    }
  }
  const std::vector<State> own = StateDict();
  for (const State& mine : own) {
    const auto place = given.find({mine.parameter, mine.key});
    if (place == given.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the optimizer's state to load lacks ", what(mine)));
    }
    const at::Tensor& value = place->second->value;
    if (!value.defined() || value.sizes() != mine.value.sizes() ||
        value.scalar_type() != mine.value.scalar_type()) {
      return absl::InvalidArgumentError(absl::StrCat("the optimizer's state to load has ",
                                                     Describe(value), " for ", what(mine),
                                                     ", which here is ", Describe(mine.value)));
    }
  }
  if (given.size() > own.size()) {
    for (const State& mine : own) given.erase({mine.parameter, mine.key});
    return absl::InvalidArgumentError(absl::StrCat("the optimizer's state to load has ",
                                                   what(*given.begin()->second),
                                                   ", which this optimizer does not keep"));
  }
  UpdateState([&](const State& mine) {
    mine.value.copy_(given[{mine.parameter, mine.key}]->value);
  });
  return absl::OkStatus();
}

void FusedOptimizer::UpdateState(const std::function<void(const State&)>& update) {
  at::NoGradGuard no_grad;
  for (const State& state : StateDict()) update(state);
  StateChanged();
}

void FusedOptimizer::UpdateFullState(Strategy& strategy,
                                     const std::function<void(const State&)>& update) {
  at::NoGradGuard no_grad;
  std::map<std::string, std::vector<NamedTensor>> by_key;
  for (const State& state : StateDict()) {
    if (state.key == "step") {
      update(state);
    } else {
      by_key[state.key].push_back({state.parameter, state.value});
    }
  }
  for (const auto& [key, tensors] : by_key) {
    strategy.UpdateFull(tensors, [&, &key = key](const std::string& name, at::Tensor full) {
      update({name, key, std::move(full)});
    });
  }
  StateChanged();
}

void FusedOptimizer::StateChanged() {
  for (Slot& slot : slots_) slot.started = slot.step.item<float>() > 0;
}

void FusedOptimizer::save(torch::serialize::OutputArchive&) const {
  TORCH_CHECK(false, "torch::save() knows parameters by their addresses: use StateDict()");
}

void FusedOptimizer::load(torch::serialize::InputArchive&) {
  TORCH_CHECK(false, "torch::load() knows parameters by their addresses: use LoadStateDict()");
}

}  // namespace lockstep::parallel::optim
