#include "lockstep/parallel/ddp/powersgd.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/memory.h"

namespace lockstep::parallel::ddp {
namespace {

// A gradient's memory as a matrix, or nothing where it is no matrix worth compressing.
std::optional<at::Tensor> AsMatrix(const at::Tensor& gradient, const PowerSgdOptions& options) {
  const at::ScalarType dtype = gradient.scalar_type();
  if (gradient.dim() < 2 || gradient.numel() == 0) return std::nullopt;
  if (dtype != at::kFloat && dtype != at::kDouble) return std::nullopt;
  int64_t outer = 0;  // of the dimensions with more than one element: others have any stride
  for (int64_t i = 1; i < gradient.dim(); ++i) {
    const bool longer = gradient.stride(i) > gradient.stride(outer);
    if (gradient.size(outer) == 1 || (gradient.size(i) > 1 && longer)) outer = i;
  }
  const int64_t rows = gradient.size(outer);
  const int64_t columns = gradient.numel() / rows;
  const double sent = static_cast<double>((rows + columns) * options.rank);
  if (sent * options.min_compression > static_cast<double>(gradient.numel())) return std::nullopt;
  return gradient.as_strided({rows, columns}, {columns, 1});
}

// Gram-Schmidt, twice for each column ("twice is enough", Giraud et al., 2005). A column that
// depends on those before it, of which only rounding would be left, becomes zero.
void Orthogonalize(const at::Tensor& matrix) {
  const double epsilon = matrix.scalar_type() == at::kDouble ? 2.2e-16 : 1.2e-7;
  for (int64_t i = 0; i < matrix.size(1); ++i) {
    at::Tensor column = matrix.select(1, i);
    const double before = column.norm().item<double>();
    for (int64_t j = 0; j < 2 * i; ++j) {
      const at::Tensor earlier = matrix.select(1, j % i);
      column.sub_(earlier * earlier.dot(column));
    }
    const double after = column.norm().item<double>();
    if (after > 100 * epsilon * before) {
      column.div_(after);
    } else {
      column.zero_();
    }
  }
}

}  // namespace

PowerSgd::PowerSgd(PowerSgdOptions options)
    : options_(options), generator_(at::detail::createCPUGenerator(options.seed)) {
  if (options_.rank > 0 && options_.min_compression > 0 && options_.start_step >= 0) return;
  throw StatusError(absl::InvalidArgumentError(absl::StrCat(
      "PowerSgd: rank (", options_.rank, ") and min_compression (", options_.min_compression,
      ") must be positive, and start_step (", options_.start_step, ") not negative")));
}

std::string PowerSgd::name() const {
  return absl::StrCat("PowerSGD of rank ", options_.rank, " from step ", options_.start_step,
                      ", min_compression=", options_.min_compression,
                      ", error_feedback=", options_.error_feedback,
                      ", warm_start=", options_.warm_start, ", seed=", options_.seed);
}

PowerSgd::Packed PowerSgd::Pack(const Bucket& bucket, comm::Communicator& comm) const {
  Packed packed;
  int64_t first = 0;
  int64_t second = 0;
  for (size_t i = 0; i < bucket.indices().size(); ++i) {
    const at::Tensor& gradient = bucket.view(i);
    if (const std::optional<at::Tensor> matrix = AsMatrix(gradient, options_)) {
      packed.matrices.push_back({.parameter = bucket.indices()[i], .m = *matrix});
      first += matrix->size(0) * options_.rank;
      second += matrix->size(1) * options_.rank;
    } else {
      packed.full.emplace_back(gradient, at::Tensor());
      first += gradient.numel();
    }
  }
  if (packed.matrices.empty()) return packed;
  trace::MemoryScope scope(trace::MemoryCategory::kBuckets);
  const at::ScalarType dtype = bucket.flat().scalar_type();
  packed.first = comm.Empty({first}, dtype);
  packed.second = comm.Empty({second}, dtype);
  first = second = 0;
  const auto take = [](const at::Tensor& from, int64_t& offset, at::IntArrayRef sizes) {
    const int64_t numel = c10::multiply_integers(sizes);
    offset += numel;
    return from.narrow(0, offset - numel, numel).view(sizes);
  };
  for (Matrix& matrix : packed.matrices) {
    matrix.p = take(packed.first, first, {matrix.m.size(0), options_.rank});
    matrix.q = take(packed.second, second, {matrix.m.size(1), options_.rank});
  }
  for (auto& [gradient, place] : packed.full) place = take(packed.first, first, gradient.sizes());
  return packed;
}

void PowerSgd::SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) {
  buckets_ = buckets;
  comm_ = &comm;
  packed_.clear();
  for (const Bucket& bucket : buckets) packed_.push_back(Pack(bucket, comm));
}

// The same numbers on all ranks and devices.
void PowerSgd::FillRandom(const at::Tensor& tensor) {
  const at::TensorOptions host = tensor.options().device(at::kCPU);
  tensor.copy_(at::empty(tensor.sizes(), host).normal_(/*mean=*/0, /*std=*/1, generator_));
}

// Q to start from: the last one where that is wanted and says something.
void PowerSgd::PrepareQ(Matrix& matrix) {
  State& state = states_[matrix.parameter];
  if (options_.warm_start && state.q.defined()) {
    matrix.q.copy_(state.q);
  } else {
    FillRandom(matrix.q);
  }
  for (int64_t i = 0; i < options_.rank; ++i) {
    at::Tensor column = matrix.q.select(1, i);
    // After a gradient of zero, all later ones would be lost.
    if (column.norm().item<double>() == 0) FillRandom(column);
  }
}

void PowerSgd::Start(size_t bucket) {
  Packed& packed = packed_[bucket];
  if (step_ < options_.start_step || packed.matrices.empty()) {
    packed.work = comm_->AllReduce(buckets_[bucket].flat(), comm::ReduceOp::kAverage);
    return;
  }
  for (Matrix& matrix : packed.matrices) {
    if (const at::Tensor& error = states_[matrix.parameter].error; error.defined()) {
      matrix.m.add_(error);
    }
    PrepareQ(matrix);
    at::mm_out(matrix.p, matrix.m, matrix.q);
  }
  for (auto& [gradient, place] : packed.full) place.copy_(gradient);
  packed.work = comm_->AllReduce(packed.first, comm::ReduceOp::kAverage);
}

void PowerSgd::Finish() {
  const bool compress = step_++ >= options_.start_step;
  for (Packed& packed : packed_) {
    ThrowIfError(packed.work.Wait());
    if (!compress || packed.matrices.empty()) continue;
    for (auto& [gradient, place] : packed.full) gradient.copy_(place);
    for (Matrix& matrix : packed.matrices) {
      Orthogonalize(matrix.p);
      at::mm_out(matrix.q, matrix.m.t(), matrix.p);
    }
    packed.work = comm_->AllReduce(packed.second, comm::ReduceOp::kAverage);
  }
  if (!compress) return;
  for (Packed& packed : packed_) {
    ThrowIfError(packed.work.Wait());
    for (Matrix& matrix : packed.matrices) {
      State& state = states_[matrix.parameter];
      trace::MemoryScope scope(trace::MemoryCategory::kBuckets);
      if (options_.warm_start) state.q = matrix.q.clone();
      if (options_.error_feedback) {
        if (!state.error.defined()) state.error = at::empty_like(matrix.m);
        state.error.copy_(matrix.m);
      }
      at::mm_out(matrix.m, matrix.p, matrix.q.t());
      if (options_.error_feedback) state.error.sub_(matrix.m);
    }
  }
}

}  // namespace lockstep::parallel::ddp
