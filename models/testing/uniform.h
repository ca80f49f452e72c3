#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

namespace lockstep::models::testing {

// Numbers in [0, 1) that Python computes too, f64: uniform() of the generate.py of each golden
// file.
inline at::Tensor Uniform(uint32_t stream, at::IntArrayRef shape) {
  at::Tensor result = at::empty(shape, at::kDouble);
  double* out = result.mutable_data_ptr<double>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    uint32_t x = static_cast<uint32_t>(i + 1) * 2654435761u + stream * 2246822519u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    out[i] = x / 4294967296.0;
  }
  return result;
}

}  // namespace lockstep::models::testing
