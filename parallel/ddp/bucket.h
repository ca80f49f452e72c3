#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::parallel::ddp {

// Parameters, by their index, that share a bucket.
using BucketIndices = std::vector<size_t>;

// Cuts `parameters` into buckets in the given order. A bucket is closed when it has reached its
// limit: limits[i] bytes for the i-th bucket of its dtype and device, the last limit for all after.
// Dtypes and devices are never mixed. Buckets are ordered by their first parameter's place in
// `order`.
std::vector<BucketIndices> AssignBuckets(const std::vector<at::Tensor>& parameters,
                                         absl::Span<const size_t> order,
                                         absl::Span<const int64_t> limits);

// The gradients of some parameters side by side in one flat tensor, so that one all-reduce serves
// all: fewer, larger messages. See Li et al., "PyTorch Distributed: Experiences on Accelerating
// Data Parallel Training", VLDB 2020.
class Bucket {
 public:
  Bucket(const std::vector<at::Tensor>& parameters, BucketIndices indices,
         comm::Communicator& comm);

  const BucketIndices& indices() const { return indices_; }

  // All gradients, of one dtype.
  const at::Tensor& flat() const { return flat_; }

  // The place of the i-th of indices(), in the parameter's shape and, where they leave no gaps, its
  // strides: gradients of other strides would cost a copy at every step.
  const at::Tensor& view(size_t i) const { return views_[i]; }

 private:
  const BucketIndices indices_;
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
};

}  // namespace lockstep::parallel::ddp
