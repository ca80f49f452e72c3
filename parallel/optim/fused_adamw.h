#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/optim/fused_optimizer.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::optim {

struct FusedAdamWOptions {
  double lr = 1e-3;            // learning rate; 0.001
  double beta1 = 0.9;          // decay of the mean of gradients, in [0, 1); 0.9
  double beta2 = 0.999;        // decay of the mean of their squares, in [0, 1); 0.999
  double eps = 1e-8;           // added to the denominator; 1e-8
  double weight_decay = 1e-2;  // decoupled, a step takes lr * weight_decay of a parameter; 0.01
  bool amsgrad = false;        // divide by the largest mean of squares so far; false
  bool maximize = false;       // climb instead of descend; false
};

// AdamW (Loshchilov and Hutter, arxiv.org/abs/1711.05101; amsgrad: Reddi et al.,
// arxiv.org/abs/1904.09237) in one pass over memory:
//
//   parallel::Ddp ddp(model, comm);
//   parallel::optim::FusedAdamW optimizer(ddp.named_parameters(), {.lr = 1e-3});
//   torch::optim::StepLR schedule(optimizer, /*step_size=*/30);
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     cross_entropy(model(batch["images"]), batch["labels"]).backward();
//     optimizer.step();
//   }
//
// Groups, gradients, state and errors: fused_optimizer.h. State: exp_avg, exp_avg_sq and, with
// amsgrad, max_exp_avg_sq.
class FusedAdamW : public FusedOptimizer {
 public:
  explicit FusedAdamW(const std::vector<NamedTensor>& parameters, FusedAdamWOptions options = {},
                      const std::vector<ParameterGroup<FusedAdamWOptions>>& groups = {});

  // Of a group, 0 being the one without a rule. May be changed between steps, but for amsgrad.
  FusedAdamWOptions& options(size_t group = 0) { return OptionsOf<FusedAdamWOptions>(group); }

 private:
  void Apply(Update& update) override;
};

}  // namespace lockstep::parallel::optim
