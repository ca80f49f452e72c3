#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

namespace lockstep::parallel {

// While it lives, this thread's forward computes in `dtype` (bf16 or f16) where that is safe, as
// torch.autocast does: matrix products and convolutions in it, sums, norms and losses in f32. The
// parameters stay f32, and so do their gradients.
//
//   {
//     parallel::Autocast autocast(images.device().type(), at::kBFloat16);
//     loss = Loss(model->forward(images), labels);
//   }
//   loss.backward();  // outside: it computes in the dtypes that forward has used
//
// Nests; the innermost counts. f16 needs a GradScaler, bf16 does not. While the outermost lives,
// LibTorch keeps a copy in `dtype` of each parameter that was used: under Fsdp, prefer
// FsdpOptions::mixed_precision, which also halves what is gathered.
class Autocast {
 public:
  Autocast(at::DeviceType device, at::ScalarType dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const at::DeviceType device_;
  const bool was_enabled_;
  const at::ScalarType dtype_before_;
};

}  // namespace lockstep::parallel
