#include "lockstep/parallel/replay.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace lockstep::parallel {
namespace {

using RandomState = Replay::RandomState;

at::Tensor StateOf(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void SetState(at::Generator generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// Puts generators into given states, and back.
class RandomScope {
 public:
  explicit RandomScope(const std::vector<RandomState>& states) {
    for (const auto& [generator, state] : states) {
      outer_.emplace_back(generator, StateOf(generator));
      SetState(generator, state);
    }
  }
  ~RandomScope() {
    for (const auto& [generator, state] : outer_) SetState(generator, state);
  }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  std::vector<RandomState> outer_;
};

Replay::Autocast AutocastOf(at::DeviceType device) {
  return {device, at::autocast::is_autocast_enabled(device),
          at::autocast::get_autocast_dtype(device)};
}

void SetAutocast(const Replay::Autocast& state) {
  at::autocast::set_autocast_enabled(state.device, state.enabled);
  at::autocast::set_autocast_dtype(state.device, state.dtype);
}

// Sets autocast, with its cache off, and back. A weight that was cast without gradients would be
// found in the cache where they are needed, and one of the second run after its graph has gone.
class AutocastScope {
 public:
  explicit AutocastScope(const std::vector<Replay::Autocast>& states)
      : outer_cache_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
    for (const Replay::Autocast& state : states) {
      outer_.push_back(AutocastOf(state.device));
      SetAutocast(state);
    }
  }
  ~AutocastScope() {
    for (const Replay::Autocast& state : outer_) SetAutocast(state);
    at::autocast::set_autocast_cache_enabled(outer_cache_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  const bool outer_cache_;
  std::vector<Replay::Autocast> outer_;
};

}  // namespace

Replay::Replay(const std::vector<at::Device>& devices, const std::function<void()>& first) {
  std::vector<at::Device> all = {at::kCPU};
  for (const at::Device& device : devices) {
    if (!device.is_cpu() && std::count(all.begin(), all.end(), device) == 0) all.push_back(device);
  }
  std::vector<RandomState> before;
  for (const at::Device& device : all) {
    if (!device.is_cpu() && !at::isAccelerator(device.type())) continue;  // meta
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    before.emplace_back(generator, StateOf(generator));
    const auto same = [&](const Autocast& state) { return state.device == device.type(); };
    if (std::none_of(autocast_.begin(), autocast_.end(), same)) {
      autocast_.push_back(AutocastOf(device.type()));
    }
  }
  {
    at::NoGradGuard no_grad;
    const AutocastScope autocast(autocast_);
    first();
  }
  for (RandomState& state : before) {
    if (!StateOf(state.first).equal(state.second)) random_.push_back(std::move(state));
  }
}

std::vector<at::Tensor> Replay::Run(const std::function<std::vector<at::Tensor>()>& again) const {
  const at::AutoGradMode with_gradients(true);
  const AutocastScope autocast(autocast_);
  const RandomScope random(random_);
  return again();
}

ScratchBuffers::ScratchBuffers(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& buffer : module.buffers()) {
    if (!buffer.defined() || !seen.insert(buffer.unsafeGetTensorImpl()).second) continue;
    buffers_.emplace_back(buffer, buffer.detach());
    buffer.set_data(buffer.detach().clone());
  }
}

ScratchBuffers::~ScratchBuffers() {
  for (const auto& [buffer, data] : buffers_) buffer.set_data(data);
}

}  // namespace lockstep::parallel
