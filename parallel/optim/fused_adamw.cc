#include "lockstep/parallel/optim/fused_adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include <memory>
#include <utility>

namespace lockstep::parallel::optim {

FusedAdamW::FusedAdamW(const std::vector<NamedTensor>& parameters, FusedAdamWOptions options,
                       const std::vector<ParameterGroup<FusedAdamWOptions>>& groups)
    : FusedOptimizer(parameters, [&] {
        std::vector<GroupSpec> specs;
        const auto add = [&specs](const FusedAdamWOptions& given,
                                  std::function<bool(const std::string&)> matches) {
          TORCH_CHECK(given.lr >= 0, "lr must be 0 or more, and is ", given.lr);
          TORCH_CHECK(given.beta1 >= 0 && given.beta1 < 1, "beta1 must be in [0, 1), and is ",
                      given.beta1);
          TORCH_CHECK(given.beta2 >= 0 && given.beta2 < 1, "beta2 must be in [0, 1), and is ",
                      given.beta2);
          TORCH_CHECK(given.eps >= 0, "eps must be 0 or more, and is ", given.eps);
          TORCH_CHECK(given.weight_decay >= 0, "weight_decay must be 0 or more, and is ",
                      given.weight_decay);
          specs.push_back({std::move(matches),
                           std::make_unique<GroupOptions<FusedAdamWOptions>>(given),
                           {"exp_avg", "exp_avg_sq"}});
          if (given.amsgrad) specs.back().state_keys.emplace_back("max_exp_avg_sq");
        };
        add(options, nullptr);
        for (const auto& group : groups) add(group.options, group.matches);
        return specs;
      }()) {}

void FusedAdamW::Apply(Update& update) {
  const FusedAdamWOptions& o = options(update.group);
  TORCH_CHECK(o.amsgrad == (update.states.size() == 3),
              "amsgrad was changed after the optimizer was made");
  at::_fused_adamw_(update.parameters, update.gradients, update.states[0], update.states[1],
                    o.amsgrad ? at::TensorList(update.states[2]) : at::TensorList(), update.steps,
                    o.lr, o.beta1, o.beta2, o.weight_decay, o.eps, o.amsgrad, o.maximize,
                    update.scale);
}

}  // namespace lockstep::parallel::optim
