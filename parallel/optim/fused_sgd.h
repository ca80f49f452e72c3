#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/optim/fused_optimizer.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::optim {

struct FusedSgdOptions {
  double lr = 1e-3;         // learning rate; 0.001
  double momentum = 0;      // of the running sum of gradients; 0: none
  double dampening = 0;     // the sum takes 1 - dampening of a gradient, but all of the first; 0
  double weight_decay = 0;  // added to the gradient, as a share of the parameter; 0
  bool nesterov = false;    // needs momentum and no dampening; false
  bool maximize = false;    // climb instead of descend; false
};

// Stochastic gradient descent, with momentum as torch.optim.SGD has it, in one pass over memory:
//
//   parallel::optim::FusedSgd optimizer(ddp.named_parameters(), {.lr = 0.1, .momentum = 0.9});
//
// Groups, gradients, state and errors: fused_optimizer.h. State: momentum_buffer, where a group has
// momentum.
class FusedSgd : public FusedOptimizer {
 public:
  explicit FusedSgd(const std::vector<NamedTensor>& parameters, FusedSgdOptions options = {},
                    const std::vector<ParameterGroup<FusedSgdOptions>>& groups = {});

  // Of a group, 0 being the one without a rule. May be changed between steps; momentum stays 0 or
  // stays above.
  FusedSgdOptions& options(size_t group = 0) { return OptionsOf<FusedSgdOptions>(group); }

 private:
  void Apply(Update& update) override;
};

}  // namespace lockstep::parallel::optim
