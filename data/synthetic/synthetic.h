#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data::synthetic {

struct Options {
  int64_t size = 1024;                       // Rows, at least 1. Default: 1024.
  std::vector<int64_t> shape = {1, 28, 28};  // Of one image. Default: MNIST's.
  int64_t classes = 10;                      // Labels are in [0, classes). Default: 10.
  uint64_t seed = 0;                         // Default: 0.
  int64_t rows_per_chunk = 0;                // What chunks() reports; 0: none. Default: 0.
};

// Made-up data of any size, for benchmarks and tests. Every value is a pure function of (seed,
// row, element), so that any rank can make any row, and any test can say what must be in it:
//
//   auto dataset = lockstep::ValueOrThrow(data::synthetic::Create({.size = 1'000'000}));
//   batch["images"];  // (rows, shape...) float32, uniform in [0, 1): Pixel(seed, row, element)
//   batch["labels"];  // (rows,) int64, uniform in [0, classes): Label(seed, row, classes)
//
// There is nothing to learn in it: labels do not depend on images. Takes no memory; reads are
// thread-safe. INVALID_ARGUMENT for a size, a dimension or a number of classes below 1.
absl::StatusOr<std::unique_ptr<Dataset>> Create(const Options& options);

// Element `element`, in row-major order, of the image in `row`.
float Pixel(uint64_t seed, int64_t row, int64_t element);

int64_t Label(uint64_t seed, int64_t row, int64_t classes);

}  // namespace lockstep::data::synthetic
