#include "lockstep/parallel/autocast.h"

#include <ATen/autocast_mode.h>

namespace lockstep::parallel {

Autocast::Autocast(at::DeviceType device, at::ScalarType dtype)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)) {
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf,
              "Autocast computes in bf16 or f16, not ", c10::toString(dtype));
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_enabled(device_, was_enabled_);
}

}  // namespace lockstep::parallel
