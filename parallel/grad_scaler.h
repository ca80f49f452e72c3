#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

// The same on all ranks.
struct GradScalerOptions {
  double init_scale = 65536;       // 2^16
  double growth_factor = 2;        // above 1; 2
  double backoff_factor = 0.5;     // between 0 and 1; 0.5
  int64_t growth_interval = 2000;  // steps in a row without overflow before it grows; 2000
};

// Loss scaling, for training in f16: gradients below 6e-8 would be zero there, so that the loss is
// multiplied by a factor, and the gradients divided by it again before they are used.
//
//   GradScaler scaler(*strategy);
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     scaler.Scale(Loss(model, batch)).backward();
//     strategy->FinishBackward();
//     scaler.Unscale(optimizer);     // only where gradients are looked at before the step:
//     strategy->ClipGradNorm(1.0);
//     scaler.Step(optimizer);        // in the place of optimizer.step()
//     scaler.Update();
//   }
//
// The semantics are those of torch.amp.GradScaler. A step whose gradients are not all finite is
// left out, and multiplies the scale by backoff_factor; growth_interval steps in a row that were
// not multiply it by growth_factor. So the scale stays near the largest at which nothing overflows,
// and the first steps of a training may be left out. bf16 and f32 have the same range, and need
// none of this. Under gradient accumulation all backwards of a step have the same scale: call
// Update() once a step.
//
// RANKS. All decide alike, since the gradients that they hold are the same; where the strategy
// shards them, by one number summed over the ranks. Unscale() and Step() are collective then. Under
// Ddp, parameters that it ignores must be finite on all ranks or on none.
//
// OPTIMIZERS. Any number, each with some of strategy.parameters(), in the same order on all ranks;
// each is stepped or left out by its own gradients. Gradients in f16 are only for a FusedOptimizer
// without Unscale(): it divides them as it uses them, in f32, where in f16 they would be lost
// again.
//
// The strategy outlives this. Misuse (c10::Error): Unscale() or Step() twice for an optimizer
// without Update(), Update() without Step(), options out of their range.
//
// See Micikevicius et al., "Mixed Precision Training", 2018.
class GradScaler {
 public:
  explicit GradScaler(Strategy& strategy, const GradScalerOptions& options = {});

  // `loss` times scale(), in its dtype; f32 is best, as f16 ends at 65504.
  at::Tensor Scale(const at::Tensor& loss) const;

  // Divides the gradients of the optimizer's parameters by scale(), in place.
  void Unscale(torch::optim::Optimizer& optimizer);

  // Divides them unless Unscale() has, and calls optimizer.step() if all of them are finite on all
  // ranks. Returns whether it did.
  bool Step(torch::optim::Optimizer& optimizer);

  // Sets the scale for the next step, by what the steps since the last Update() came to.
  // StatusError (FailedPrecondition) where it has fallen below 1e-38: no gradient was finite at any
  // scale.
  void Update();

  double scale() const { return scale_; }

  // All that decides how it goes on, for checkpoints: a line of text, the same on all ranks.
  // LoadState: InvalidArgument, and no change, for what SaveState() cannot have returned.
  std::string SaveState() const;
  absl::Status LoadState(std::string_view state);

 private:
  enum class Stage { kUnscaled, kStepped };
  struct Progress {
    const torch::optim::Optimizer* optimizer = nullptr;
    Stage stage = Stage::kUnscaled;
    bool finite = true;
  };

  Progress* Find(const torch::optim::Optimizer& optimizer);

  // Multiplies the gradients by `factor`; whether all of them were finite on all ranks.
  bool CheckAndMultiply(torch::optim::Optimizer& optimizer, double factor);

  Strategy& strategy_;
  const GradScalerOptions options_;
  double scale_;
  int64_t growth_ = 0;              // steps in a row without overflow
  std::vector<Progress> progress_;  // since the last Update()
};

}  // namespace lockstep::parallel
