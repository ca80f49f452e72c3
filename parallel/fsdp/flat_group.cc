#include "lockstep/parallel/fsdp/flat_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "lockstep/tools/trace/memory.h"

namespace lockstep::parallel::fsdp {
namespace {

std::vector<int64_t> Numels(const std::vector<NamedTensor>& parameters) {
  std::vector<int64_t> numels;
  for (const NamedTensor& parameter : parameters) numels.push_back(parameter.tensor.numel());
  return numels;
}

// Points a storage at memory that somebody else owns, or at none.
void Point(const at::Tensor& tensor, void* data) {
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(data, tensor.device()));
}

}  // namespace

FlatGroup::FlatGroup(std::vector<NamedTensor> parameters, comm::Communicator& comm)
    : comm_(comm),
      parameters_(std::move(parameters)),
      layout_(Numels(parameters_), static_cast<int64_t>(parameters_[0].tensor.element_size()),
              comm.size()),
      requires_grad_(parameters_[0].tensor.requires_grad()) {
  at::NoGradGuard no_grad;
  const at::ScalarType dtype = parameters_[0].tensor.scalar_type();
  {
    trace::MemoryScope scope(trace::MemoryCategory::kUnsharded);
    full_ = comm_.Empty({layout_.padded_numel()}, dtype).zero_();
  }
  for (size_t i = 0; i < size(); ++i) {
    at::Tensor view = ViewOf(full_, i);
    view.copy_(parameters_[i].tensor);
    parameters_[i].tensor.set_data(view);
    parameters_[i].tensor.mutable_grad().reset();  // the first backward would add to it
  }
  {
    trace::MemoryScope scope(trace::MemoryCategory::kParameters);
    shard_ = comm_.Empty({layout_.shard_numel()}, dtype);
  }
  StoreShard();
  for (size_t i = 0; i < size(); ++i) {
    const FlatLayout::Slice slice = layout_.slice(i, comm_.rank());
    slices_.push_back(
        shard_.narrow(0, slice.in_shard, slice.numel).detach().set_requires_grad(requires_grad_));
  }
  Point(full_, nullptr);
}

FlatGroup::~FlatGroup() {
  // The model outlives this; its storage must not point to a buffer of the pool.
  if (full_.defined()) Point(full_, nullptr);
}

at::Tensor FlatGroup::ViewOf(const at::Tensor& flat, size_t i) const {
  const at::Tensor& parameter = parameters_[i].tensor;
  return flat.narrow(0, layout_.offset(i), parameter.numel()).view(parameter.sizes());
}

comm::Work FlatGroup::StartUnshard(BufferPool& pool) {
  buffer_ = pool.Take(layout_.padded_numel(), shard_.scalar_type());
  return comm_.AllGatherInto(buffer_, shard_);
}

void FlatGroup::FinishUnshard() { Point(full_, buffer_.data_ptr()); }

void FlatGroup::Reshard(BufferPool& pool) {
  Point(full_, nullptr);
  pool.Give(std::exchange(buffer_, at::Tensor()));
}

void FlatGroup::StoreShard() {
  at::NoGradGuard no_grad;
  shard_.copy_(full_.narrow(0, comm_.rank() * layout_.shard_numel(), layout_.shard_numel()));
}

void FlatGroup::StoreGradient(size_t i, BufferPool& pool) {
  if (!gradient_.defined()) {
    gradient_ = pool.Take(layout_.padded_numel(), shard_.scalar_type());
    stored_.assign(size(), false);
  }
  at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
  at::Tensor view = ViewOf(gradient_, i);
  at::mul_out(view, gradient, at::Scalar(1.0 / comm_.size()));
  gradient.reset();
  stored_[i] = true;
}

comm::Work FlatGroup::StartReduce() {
  for (size_t i = 0; i < size(); ++i) {
    if (!stored_[i]) ViewOf(gradient_, i).zero_();
  }
  {
    trace::MemoryScope scope(trace::MemoryCategory::kGradients);
    shard_gradient_ = comm_.Empty({layout_.shard_numel()}, shard_.scalar_type());
  }
  return comm_.ReduceScatterInto(shard_gradient_, gradient_, comm::ReduceOp::kSum);
}

void FlatGroup::FinishReduce(BufferPool& pool) {
  // Aliases and not autograd's views: LibTorch's zero_grad() detaches gradients in place, which
  // views refuse.
  at::AutoDispatchBelowADInplaceOrView no_views;
  pool.Give(std::exchange(gradient_, at::Tensor()));
  for (size_t i = 0; i < size(); ++i) {
    const FlatLayout::Slice slice = layout_.slice(i, comm_.rank());
    const at::Tensor part = shard_gradient_.narrow(0, slice.in_shard, slice.numel);
    at::Tensor& gradient = slices_[i].mutable_grad();
    if (gradient.defined()) {
      gradient.add_(part);
    } else {
      gradient = part;
    }
  }
  shard_gradient_.reset();
}

}  // namespace lockstep::parallel::fsdp
