#include "lockstep/parallel/ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel::ddp {
namespace {

[[noreturn]] void ThrowPrecondition(const std::string& message) {
  throw StatusError(absl::FailedPreconditionError(message));
}

}  // namespace

Reducer::Reducer(const std::vector<NamedTensor>& trainable, std::vector<NamedTensor> frozen,
                 std::vector<at::Tensor> buffers, std::unique_ptr<comm::Communicator> comm,
                 const DdpOptions& options, std::function<bool()> sync,
                 std::function<void(StepReader)> report)
    : timer_(comm->device()),
      comm_(std::move(comm), timer_),
      bucket_limits_({options.first_bucket_bytes, options.bucket_bytes}),
      find_unused_(options.find_unused_parameters),
      static_graph_(options.static_graph),
      hook_(options.comm_hook ? options.comm_hook : std::make_shared<AllReduceHook>()),
      sync_(std::move(sync)),
      report_(std::move(report)),
      frozen_(std::move(frozen)),
      buffers_(std::move(buffers), comm_) {
  for (const NamedTensor& parameter : trainable) {
    parameters_.push_back({.name = parameter.name, .tensor = parameter.tensor});
  }
  order_.resize(parameters_.size());
  std::iota(order_.rbegin(), order_.rend(), 0);
  MakeBuckets(order_);
  for (size_t index = 0; index < parameters_.size(); ++index) {
    hooks_.emplace_back(parameters_[index].tensor, [this, index] { Accumulated(index); });
  }
}

void Reducer::MakeBuckets(absl::Span<const size_t> order) {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  buckets_.clear();  // before the new ones: gradients that alias them are gone, or keep them
  for (BucketIndices& indices : AssignBuckets(tensors, order, bucket_limits_)) {
    for (size_t i = 0; i < indices.size(); ++i) {
      parameters_[indices[i]].bucket = buckets_.size();
      parameters_[indices[i]].position = i;
    }
    buckets_.emplace_back(tensors, std::move(indices), comm_);
  }
  hook_->SetBuckets(buckets_, comm_);
}

template <typename Body>
void Reducer::Guarded(const std::string& where, Body body) {
  ThrowIfError(failure_);
  at::NoGradGuard no_grad;
  try {
    body();
  } catch (const StatusError& error) {
    failure_ = error.status();
  } catch (const std::exception& error) {
    failure_ = absl::InternalError(absl::StrCat("in backward, at ", where, ": ", error.what()));
  }
  if (failure_.ok()) return;
  comm_.Abort(failure_);
  throw StatusError(failure_);
}

void Reducer::Accumulated(size_t index) {
  if (!sync_()) return;
  Parameter& parameter = parameters_[index];
  Guarded(parameter.name, [&] {
    if (!running_) {
      Begin(/*shadow=*/false);
      AtEndOfBackward([this] { Guarded("its end", [this] { Finish(/*shadow=*/false); }); },
                      [this, alive = std::weak_ptr<bool>(alive_)] {
                        if (alive.expired()) return;
                        if (failure_.ok()) failure_ = AbandonedBackwardError();
                        comm_.Abort(failure_);
                      });
    }
    if (!parameter.tensor.grad().defined()) return;  // a Function's backward may return none
    CheckGradient(parameter);
    parameter.used = true;
    if (!order_known_) parameter.arrival = arrivals_++;
    Store(parameter);
  });
}

void Reducer::Begin(bool shadow) {
  CheckTrainable();
  if (!next_order_.empty()) {
    order_ = std::exchange(next_order_, {});
    MakeBuckets(order_);
  }
  timer_.BeginBackward();
  if (join_) CountActive(shadow);
  if (shadow && join_->count == 0) return;
  if (shadow && static_graph_ && !recorded_) {
    ThrowPrecondition(
        "Join: with static_graph the first backward must be one of all ranks, and this one had no "
        "batch for it");
  }
  running_ = true;
  next_ = 0;
  for (Parameter& parameter : parameters_) {
    parameter.used = parameter.stored = false;
  }
  pending_.clear();
  for (const Bucket& bucket : buckets_) pending_.push_back(bucket.indices().size());
  buffers_.Start(root());
  for (Parameter& parameter : parameters_) {
    if (!parameter.expected) StoreUnused(parameter, shadow);
  }
}

void Reducer::BeginJoin(bool divide_by_active) {
  if (join_) ThrowPrecondition("Join: this Ddp has one already");
  join_ = {
      .divide_by_active = divide_by_active,
      .active = at::zeros({comm_.size()}, at::TensorOptions(at::kLong).device(comm_.device()))};
}

void Reducer::CountActive(bool shadow) {
  at::Tensor active = join_->active;
  active.zero_();
  if (!shadow) active[comm_.rank()].fill_(1);
  ThrowIfError(timer_.Wait(comm_.AllReduce(active, comm::ReduceOp::kSum)));
  const at::Tensor counted = active.cpu();
  const int64_t* ranks = counted.const_data_ptr<int64_t>();
  join_->count = std::accumulate(ranks, ranks + comm_.size(), int64_t{0});
  join_->root = static_cast<int>(std::find(ranks, ranks + comm_.size(), 1) - ranks);
}

void Reducer::CheckTrainable() {
  for (const Parameter& parameter : parameters_) {
    if (parameter.tensor.requires_grad()) continue;
    ThrowPrecondition(
        absl::StrCat("parameter ", parameter.name,
                     " was trainable when Ddp was made and is frozen now, so its bucket would wait "
                     "for it: set requires_grad before Ddp is made, or make a new one"));
  }
  for (const NamedTensor& parameter : frozen_) {
    if (!parameter.tensor.requires_grad()) continue;
    ThrowPrecondition(
        absl::StrCat("parameter ", parameter.name,
                     " was frozen when Ddp was made and is trainable now, so its gradient would "
                     "not be averaged: set requires_grad before Ddp is made, or make a new one"));
  }
}

void Reducer::CheckGradient(const Parameter& parameter) {
  if (!parameter.expected) {
    ThrowPrecondition(absl::StrCat("static_graph: parameter ", parameter.name,
                                   " got a gradient, and had none in the first backward"));
  }
  if (parameter.stored) throw StatusError(GradientTwiceError(parameter.name));
  if (parameter.tensor.grad().layout() == at::kStrided) return;
  ThrowPrecondition(absl::StrCat("the gradient of parameter ", parameter.name,
                                 " is sparse, and Ddp averages dense ones only: build its "
                                 "Embedding with sparse(false), or ignore it"));
}

void Reducer::Store(Parameter& parameter) {
  at::Tensor view = buckets_[parameter.bucket].view(parameter.position);
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  // Where gradients have accumulated in place, they are in the bucket already.
  if (gradient.const_data_ptr() != view.const_data_ptr()) {
    const trace::Span span("MEMCPY_IN_FUSION_BUFFER", "communication");
    view.copy_(gradient);
  }
  gradient = view;
  MarkStored(parameter);
}

// A parameter that this backward does not reach here. What earlier ones under NoSync() have
// accumulated counts.
void Reducer::StoreUnused(Parameter& parameter, bool shadow) {
  if (!shadow && parameter.tensor.grad().defined()) {
    parameter.used = true;
    Store(parameter);
    return;
  }
  at::Tensor(buckets_[parameter.bucket].view(parameter.position)).zero_();
  MarkStored(parameter);
}

void Reducer::MarkStored(Parameter& parameter) {
  parameter.stored = true;
  --pending_[parameter.bucket];
  for (; next_ < buckets_.size() && pending_[next_] == 0; ++next_) hook_->Start(next_);
}

void Reducer::Finish(bool shadow) {
  running_ = false;
  FillUnused(shadow);
  if (finds_unused()) ShareUsed();
  if (!order_known_) ShareOrder();
  timer_.Waiting([this] {
    hook_->Finish();
    buffers_.Finish();
  });
  if (join_ && join_->divide_by_active) {
    for (const Bucket& bucket : buckets_) {
      at::Tensor flat = bucket.flat();
      flat.mul_(static_cast<double>(comm_.size()) / static_cast<double>(join_->count));
    }
  }
  if (used_.defined() && !shadow) {
    const uint8_t* used = used_.const_data_ptr<uint8_t>();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& parameter = parameters_[i];
      if (parameter.used || used[i] == 0) continue;
      parameter.tensor.mutable_grad() = buckets_[parameter.bucket].view(parameter.position);
    }
  }
  recorded_ = true;
  if (!shadow) ++steps_;
  report_(timer_.End());
}

void Reducer::FillUnused(bool shadow) {
  for (Parameter& parameter : parameters_) {
    if (parameter.stored) continue;
    if (!shadow && !finds_unused()) {
      ThrowPrecondition(absl::StrCat(
          "parameter ", parameter.name, " got no gradient in this backward",
          static_graph_ ? " but did in the first, and static_graph was promised"
                        : ", so the ranks cannot average it: use it in forward on every rank, set "
                          "requires_grad to false before Ddp is made, or set "
                          "find_unused_parameters"));
    }
    StoreUnused(parameter, shadow);
    if (static_graph_ && !recorded_) parameter.expected = parameter.used;
  }
}

void Reducer::ShareUsed() {
  used_ = at::empty({static_cast<int64_t>(parameters_.size())}, at::kByte);
  uint8_t* used = used_.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    used[i] = parameters_[i].used ? 1 : 0;
  }
  const at::Tensor shared = used_.to(comm_.device());
  ThrowIfError(timer_.Wait(comm_.AllReduce(shared, comm::ReduceOp::kMax)));
  used_ = shared.cpu();
}

// Gradients arrive in about the same order in every backward: buckets in that order are full
// earlier. The order of one rank goes for all.
void Reducer::ShareOrder() {
  std::vector<size_t> order = order_;
  std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) {
    return static_cast<uint64_t>(parameters_[a].arrival) <
           static_cast<uint64_t>(parameters_[b].arrival);  // those that never arrived last
  });
  at::Tensor shared = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), shared.mutable_data_ptr<int64_t>());
  shared = shared.to(comm_.device());
  ThrowIfError(timer_.Wait(comm_.Broadcast(shared, root())));
  shared = shared.cpu();
  const int64_t* data = shared.const_data_ptr<int64_t>();
  order.assign(data, data + order.size());
  if (order != order_) next_order_ = std::move(order);
  order_known_ = true;
}

void Reducer::EndJoin() {
  join_.reset();
  timer_.End();  // what ended it belongs to no step
}

bool Reducer::Shadow() {
  bool active = false;
  Guarded("the backward of other ranks", [&] {
    Begin(/*shadow=*/true);
    active = join_->count > 0;
    if (active) Finish(/*shadow=*/true);
  });
  return active;
}

}  // namespace lockstep::parallel::ddp
