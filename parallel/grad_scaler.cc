#include "lockstep/parallel/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/device_groups.h"
#include "lockstep/parallel/optim/fused_optimizer.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

constexpr char kScale[] = "scale";
constexpr char kGrowth[] = "growth";
constexpr double kSmallestScale = 1e-38;  // about where f32 ends

bool IsScale(double scale) {
  return scale >= kSmallestScale && std::isfinite(static_cast<float>(scale));
}

std::vector<at::Tensor> Gradients(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) gradients.push_back(parameter.grad());
    }
  }
  return gradients;
}

// The kernels divide by the scale; the optimizer's own steps after this one do not.
void StepScaled(optim::FusedOptimizer& optimizer, double scale, at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  optimizer.SetGradientScale(at::full({}, scale, options), /*found_inf=*/at::Tensor());
  try {
    optimizer.step();
  } catch (...) {
    optimizer.SetGradientScale(at::Tensor(), at::Tensor());
    throw;
  }
  optimizer.SetGradientScale(at::Tensor(), at::Tensor());
}

}  // namespace

GradScaler::GradScaler(Strategy& strategy, const GradScalerOptions& options)
    : strategy_(strategy), options_(options), scale_(static_cast<float>(options.init_scale)) {
  TORCH_CHECK(IsScale(options.init_scale), "GradScaler: init_scale must be positive and finite in ",
              "f32, and is ", options.init_scale);
  TORCH_CHECK(options.growth_factor > 1 && std::isfinite(options.growth_factor),
              "GradScaler: growth_factor must be above 1, and is ", options.growth_factor);
  TORCH_CHECK(options.backoff_factor > 0 && options.backoff_factor < 1,
              "GradScaler: backoff_factor must be between 0 and 1, and is ",
              options.backoff_factor);
  TORCH_CHECK(options.growth_interval > 0,
              "GradScaler: growth_interval must be 1 at least, and is ", options.growth_interval);
}

at::Tensor GradScaler::Scale(const at::Tensor& loss) const { return loss * scale_; }

GradScaler::Progress* GradScaler::Find(const torch::optim::Optimizer& optimizer) {
  for (Progress& each : progress_) {
    if (each.optimizer == &optimizer) return &each;
  }
  return nullptr;
}

bool GradScaler::CheckAndMultiply(torch::optim::Optimizer& optimizer, double factor) {
  const at::NoGradGuard no_grad;
  at::Tensor any = at::zeros({1}, at::kDouble);
  for (const std::vector<at::Tensor>& gradients : GroupByDeviceAndDtype(Gradients(optimizer))) {
    const auto options = gradients[0].options().dtype(at::kFloat);
    at::Tensor found = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found,
                                                   at::full({1}, factor, options));
    any = any.to(found.device()) + found;
  }
  return strategy_.SumOverShards(any).item<double>() == 0;  // waits for a GPU, once
}

void GradScaler::Unscale(torch::optim::Optimizer& optimizer) {
  TORCH_CHECK(
      Find(optimizer) == nullptr,
      "GradScaler: Unscale() after Unscale() or Step() of the same optimizer; call Update() "
      "once a step, after Step()");
  for (const at::Tensor& gradient : Gradients(optimizer)) {
    TORCH_CHECK(gradient.scalar_type() != at::kHalf,
                "GradScaler: gradients in f16 cannot be unscaled, as many would be zero then: keep "
                "the parameters in f32, or call Step() alone, with a FusedOptimizer");
  }
  const bool finite = CheckAndMultiply(optimizer, 1 / scale_);
  progress_.push_back({.optimizer = &optimizer, .stage = Stage::kUnscaled, .finite = finite});
}

bool GradScaler::Step(torch::optim::Optimizer& optimizer) {
  Progress* progress = Find(optimizer);
  TORCH_CHECK(progress == nullptr || progress->stage == Stage::kUnscaled,
              "GradScaler: Step() after Step() of the same optimizer; call Update() once a step");
  auto* fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer);
  if (progress == nullptr && fused != nullptr) {
    const bool finite = CheckAndMultiply(optimizer, 1);
    progress_.push_back({.optimizer = &optimizer, .stage = Stage::kStepped, .finite = finite});
    const std::vector<at::Tensor> gradients = Gradients(optimizer);
    if (finite && !gradients.empty()) StepScaled(*fused, scale_, gradients[0].device());
    return finite;
  }
  if (progress == nullptr) {
    Unscale(optimizer);
    progress = &progress_.back();
  }
  progress->stage = Stage::kStepped;
  if (progress->finite) optimizer.step();
  return progress->finite;
}

void GradScaler::Update() {
  bool stepped = false, finite = true;
  for (const Progress& each : progress_) {
    stepped = stepped || each.stage == Stage::kStepped;
    finite = finite && each.finite;
  }
  TORCH_CHECK(stepped, "GradScaler: Update() without a Step() before it");
  progress_.clear();
  if (!finite) {
    scale_ = static_cast<float>(scale_ * options_.backoff_factor);
    growth_ = 0;
    if (IsScale(scale_)) return;
    throw StatusError(absl::FailedPreconditionError(
        absl::StrCat("GradScaler: gradients were not finite at any scale down to ", scale_,
                     ", so it is not the scale: look for infinities and NaNs in the data, the loss "
                     "and the parameters")));
  }
  if (++growth_ < options_.growth_interval) return;
  growth_ = 0;
  const double grown = static_cast<float>(scale_ * options_.growth_factor);
  if (IsScale(grown)) scale_ = grown;
}

std::string GradScaler::SaveState() const {
  return nlohmann::json({{kScale, scale_}, {kGrowth, growth_}}).dump();
}

absl::Status GradScaler::LoadState(std::string_view state) {
  const nlohmann::json json = nlohmann::json::parse(state, nullptr, /*allow_exceptions=*/false);
  const bool good = json.is_object() && json.size() == 2 && json.contains(kScale) &&
                    json.contains(kGrowth) && json[kScale].is_number() &&
                    IsScale(json[kScale].get<double>()) && json[kGrowth].is_number_unsigned() &&
                    json[kGrowth].get<uint64_t>() <= std::numeric_limits<int64_t>::max();
  if (!good) {
    return absl::InvalidArgumentError(
        absl::StrCat("not the state of a GradScaler: \"", std::string(state), "\""));
  }
  scale_ = json[kScale].get<double>();
  growth_ = json[kGrowth].get<int64_t>();
  progress_.clear();
  return absl::OkStatus();
}

}  // namespace lockstep::parallel
