#include "lockstep/parallel/ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>

#include <exception>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::ddp {

Reducer::Reducer(const std::vector<NamedTensor>& parameters, comm::Communicator& comm,
                 const DdpOptions& options, std::function<bool()> sync,
                 std::function<void(const StepStatistics&)> report)
    : comm_(comm), sync_(std::move(sync)), report_(std::move(report)) {
  for (const NamedTensor& parameter : parameters) {
    names_.push_back(parameter.name);
    parameters_.push_back(parameter.tensor);
  }
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  places_.resize(parameters_.size());
  for (BucketIndices& indices :
       AssignBuckets(parameters_, order, {options.first_bucket_bytes, options.bucket_bytes})) {
    for (size_t i = 0; i < indices.size(); ++i) places_[indices[i]] = {buckets_.size(), i};
    buckets_.emplace_back(parameters_, std::move(indices), comm_);
  }
  for (size_t index = 0; index < parameters_.size(); ++index) {
    hooks_.emplace_back(parameters_[index], [this, index] { Accumulated(index); });
  }
}

void Reducer::Accumulated(size_t index) {
  if (!sync_()) return;
  at::NoGradGuard no_grad;
  try {
    if (!running_) Begin();
    Store(index);
  } catch (const StatusError&) {
    throw;  // the communicator knows
  } catch (const std::exception& error) {
    Fail(absl::InternalError(absl::StrCat("in backward, at ", names_[index], ": ", error.what())));
  }
}

void Reducer::Begin() {
  running_ = true;
  next_ = 0;
  stored_.assign(parameters_.size(), false);
  launches_.assign(buckets_.size(), Launch());
  for (size_t i = 0; i < buckets_.size(); ++i) launches_[i].pending = buckets_[i].indices().size();
  timer_.BeginBackward();
  AtEndOfBackward([this] { Finish(); });
}

void Reducer::Store(size_t index) {
  if (stored_[index]) Fail(GradientTwiceError(names_[index]));
  stored_[index] = true;
  const at::Tensor& view = buckets_[places_[index].bucket].view(places_[index].position);
  at::Tensor& gradient = parameters_[index].mutable_grad();
  // One pass: the copy into the bucket divides. Where gradients accumulated in place, and so in the
  // bucket, this only divides.
  at::mul_out(const_cast<at::Tensor&>(view), gradient, at::Scalar(1.0 / comm_.size()));
  gradient = view;
  --launches_[places_[index].bucket].pending;
  for (; next_ < buckets_.size() && launches_[next_].pending == 0; ++next_) {
    const at::Tensor& flat = buckets_[next_].flat();
    launches_[next_].work = timer_.Track(comm_.AllReduce(flat, comm::ReduceOp::kSum),
                                         static_cast<int64_t>(flat.nbytes()));
  }
}

void Reducer::Finish() {
  running_ = false;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (stored_[index]) continue;
    Fail(absl::FailedPreconditionError(absl::StrCat(
        "parameter ", names_[index],
        " got no gradient in this backward, so the ranks cannot average it: use it in forward on "
        "every rank, or set requires_grad to false before the strategy is made")));
  }
  for (const Launch& launch : launches_) {
    if (absl::Status status = timer_.Wait(launch.work); !status.ok()) {
      throw StatusError(std::move(status));
    }
  }
  report_(timer_.End());
}

void Reducer::Fail(absl::Status status) {
  comm_.Abort(status);
  throw StatusError(std::move(status));
}

}  // namespace lockstep::parallel::ddp
