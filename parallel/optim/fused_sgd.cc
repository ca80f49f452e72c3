#include "lockstep/parallel/optim/fused_sgd.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_fused_sgd.h>

#include <memory>
#include <utility>

namespace lockstep::parallel::optim {
namespace {

// LibTorch's CPU kernel forgets to store f16 and bf16 parameters, but for the last few that fill no
// vector (aten/src/ATen/native/cpu/FusedSGDKernel.cpp; seen in 2.11): the same in a loop of ours.
template <typename T>
void UpdateReduced(const FusedSgdOptions& o, bool first, float scale, at::Tensor& parameter,
                   at::Tensor& gradient, at::Tensor* momentum) {
  T* const p = parameter.mutable_data_ptr<T>();
  T* const g = gradient.mutable_data_ptr<T>();
  T* const m = momentum == nullptr ? nullptr : momentum->mutable_data_ptr<T>();
  const auto lr = static_cast<float>(o.lr);
  const auto decay = static_cast<float>(o.weight_decay);
  const auto sign = static_cast<float>(o.maximize ? -1 : 1);
  const auto kept = static_cast<float>(o.momentum);
  const auto added = static_cast<float>(first ? 1 : 1 - o.dampening);
  at::parallel_for(0, parameter.numel(), /*grain_size=*/1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float unscaled = static_cast<float>(g[i]) / scale;  // may be zero in 16 bits
      if (scale != 1) g[i] = unscaled;
      float d = sign * unscaled + decay * static_cast<float>(p[i]);
      if (m != nullptr) {
        const float sum = (first ? 0 : kept * static_cast<float>(m[i])) + added * d;
        m[i] = sum;
        d = o.nesterov ? d + kept * sum : sum;
      }
      p[i] = static_cast<float>(p[i]) - lr * d;
    }
  });
}

bool IsReducedOnCpu(const at::Tensor& tensor) {
  return tensor.is_cpu() &&
         (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
}

}  // namespace

FusedSgd::FusedSgd(const std::vector<NamedTensor>& parameters, FusedSgdOptions options,
                   const std::vector<ParameterGroup<FusedSgdOptions>>& groups)
    : FusedOptimizer(parameters, [&] {
        std::vector<GroupSpec> specs;
        const auto add = [&specs](const FusedSgdOptions& given,
                                  std::function<bool(const std::string&)> matches) {
          TORCH_CHECK(given.lr >= 0, "lr must be 0 or more, and is ", given.lr);
          TORCH_CHECK(given.momentum >= 0, "momentum must be 0 or more, and is ", given.momentum);
          TORCH_CHECK(given.weight_decay >= 0, "weight_decay must be 0 or more, and is ",
                      given.weight_decay);
          TORCH_CHECK(!given.nesterov || (given.momentum > 0 && given.dampening == 0),
                      "nesterov needs a momentum above 0 and a dampening of 0");
          specs.push_back(
              {std::move(matches), std::make_unique<GroupOptions<FusedSgdOptions>>(given), {}});
          if (given.momentum > 0) specs.back().state_keys.emplace_back("momentum_buffer");
        };
        add(options, nullptr);
        for (const auto& group : groups) add(group.options, group.matches);
        return specs;
      }()) {}

void FusedSgd::Apply(Update& update) {
  const FusedSgdOptions& o = options(update.group);
  TORCH_CHECK((o.momentum > 0) == !update.states.empty(),
              "momentum was changed from or to 0 after the optimizer was made");
  if (IsReducedOnCpu(update.parameters[0])) {
    const auto loop = update.parameters[0].scalar_type() == at::kHalf ? UpdateReduced<at::Half>
                                                                      : UpdateReduced<at::BFloat16>;
    const float scale = update.scale.has_value() ? update.scale->item<float>() : 1;
    for (size_t i = 0; i < update.parameters.size(); ++i) {
      loop(o, update.first, scale, update.parameters[i], update.gradients[i],
           update.states.empty() ? nullptr : &update.states[0][i]);
    }
    return;
  }
  at::_fused_sgd_(update.parameters, update.gradients,
                  update.states.empty() ? at::TensorList() : at::TensorList(update.states[0]),
                  o.weight_decay, o.momentum, o.lr, o.dampening, o.nesterov, o.maximize,
                  update.first, update.scale);
}

}  // namespace lockstep::parallel::optim
