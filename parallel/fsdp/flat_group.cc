#include "lockstep/parallel/fsdp/flat_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/grad_hook.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/memory.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel::fsdp {
namespace {

enum { kMaster, kParameter, kReduce };

std::vector<at::ScalarType> Dtypes(at::ScalarType master, const MixedPrecision& mixed) {
  if (!at::isFloatingType(master)) return {master, master, master};
  const at::ScalarType parameter = mixed.param.value_or(master);
  return {master, parameter, mixed.reduce.value_or(parameter)};
}

FlatLayout LayoutOf(const std::vector<NamedTensor>& parameters,
                    const std::vector<at::ScalarType>& dtypes, int ranks) {
  std::vector<int64_t> numels;
  for (const NamedTensor& parameter : parameters) numels.push_back(parameter.tensor.numel());
  size_t element_bytes = at::elementSize(dtypes[0]);
  for (at::ScalarType dtype : dtypes)
    element_bytes = std::min(element_bytes, at::elementSize(dtype));
  return FlatLayout(numels, static_cast<int64_t>(element_bytes), ranks);
}

}  // namespace

FlatGroup::FlatGroup(std::vector<NamedTensor> parameters, ShardContext& context)
    : context_(context),
      parameters_(std::move(parameters)),
      dtypes_(Dtypes(parameters_[0].tensor.scalar_type(), context.options().mixed_precision)),
      layout_(LayoutOf(parameters_, dtypes_, context.shard().size())),
      shard_rank_(context.shard().rank()),
      requires_grad_(parameters_[0].tensor.requires_grad()),
      stays_whole_(context.options().sharding != Sharding::kFull),
      staged_(context.options().cpu_offload || dtypes_[kMaster] != dtypes_[kParameter]),
      storage_(layout_.padded_numel() * at::elementSize(dtypes_[kParameter]),
               context.world().device()),
      blocked_storage_(layout_.padded_numel() * at::elementSize(dtypes_[kParameter]),
                       context.world().device()) {
  at::NoGradGuard no_grad;
  comm::Communicator& comm = context_.world();
  {
    trace::MemoryScope scope(trace::MemoryCategory::kParameters);
    if (stays_whole_) buffer_ = comm.Empty({layout_.padded_numel()}, dtypes_[kParameter]);
    if (stays_whole_ && !staged_) {
      shard_ = OwnPart(buffer_);
    } else if (context_.options().cpu_offload) {
      shard_ = EmptyOnCpu();
    } else {
      shard_ = comm.Empty({layout_.shard_numel()}, dtypes_[kMaster]);
    }
  }
  shard_.zero_();
  const at::Tensor full = storage_.Tensor({layout_.padded_numel()}, dtypes_[kParameter]);
  std::vector<std::string> names;
  for (size_t i = 0; i < size(); ++i) {
    at::Tensor& parameter = parameters_[i].tensor;
    const FlatLayout::Slice slice = SliceOf(i);
    slices_.push_back(
        shard_.narrow(0, slice.in_shard, slice.numel).detach().set_requires_grad(requires_grad_));
    slices_[i].detach().copy_(
        parameter.detach().reshape(-1).narrow(0, slice.in_parameter, slice.numel));
    if (stays_whole_) ViewOf(buffer_, i).copy_(parameter);
    parameter.set_data(ViewOf(full, i));
    parameter.mutable_grad().reset();  // the first backward would add to it
    names.push_back(parameters_[i].name);
  }
  SetNames("", names);
}

FlatGroup::~FlatGroup() {
  // The model outlives this; its storage must not point to a buffer of the pool.
  if (slices_.empty()) return;
  storage_.Seal();
  UnblockGradients();
}

void FlatGroup::SetNames(const std::string& unit, const std::vector<std::string>& parameters) {
  for (size_t i = 0; i < size(); ++i) parameters_[i].name = parameters[i];
  label_ = unit.empty() ? "the model's own Unit" : absl::StrCat("Unit \"", unit, "\"");
  storage_.SetMessage(absl::StrCat(
      "a parameter of ", label_, " (", parameters[0], size() > 1 ? ", ..." : "",
      ") was used while an Fsdp has it sharded, so it has no memory here. Only its Unit's own "
      "forward and backward may use it: call block(x) or block->forward(x), which run hooks, not "
      "block->as<Impl>()->forward(x); read and write it by Fsdp::UpdateState or between "
      "Fsdp::Unshard and Reshard; make the optimizer after sharding, from fsdp.parameters()"));
  blocked_storage_.SetMessage(absl::StrCat(
      "the gradient of a parameter of ", label_, " (", parameters[0], size() > 1 ? ", ..." : "",
      ") was used on the model, but an Fsdp has sharded it: gradients are those of "
      "fsdp.parameters(). Make the optimizer after sharding, from these, and clip by "
      "fsdp.ClipGradNorm()"));
}

at::Tensor FlatGroup::ViewOf(const at::Tensor& flat, size_t i) const {
  const at::Tensor& parameter = parameters_[i].tensor;
  return flat.narrow(0, layout_.offset(i), parameter.numel()).view(parameter.sizes());
}

// In memory that a GPU can copy from and to while the host goes on.
at::Tensor FlatGroup::EmptyOnCpu() const {
  const bool pinned = context_.world().device().is_cuda();
  return at::empty({layout_.shard_numel()},
                   at::TensorOptions(dtypes_[kMaster]).pinned_memory(pinned));
}

at::Tensor FlatGroup::OwnPart(const at::Tensor& flat) const {
  return flat.narrow(0, shard_rank_ * layout_.shard_numel(), layout_.shard_numel());
}

void FlatGroup::StartUnshard() {
  at::NoGradGuard no_grad;
  if (!buffer_.defined()) {
    buffer_ = context_.unsharded_pool().Take(layout_.padded_numel(), dtypes_[kParameter]);
  }
  if (small_shard_.defined()) {
    gather_ = context_.reshard()->AllGatherInto(buffer_, small_shard_, label_);
    return;
  }
  at::Tensor own = OwnPart(buffer_);
  if (staged_) own.copy_(shard_, /*non_blocking=*/true);
  if (context_.options().cpu_offload) uploaded_.Record(own.device());
  gather_ = context_.shard().AllGatherInto(buffer_, staged_ ? own : shard_, label_);
}

void FlatGroup::FinishUnshard() {
  ThrowIfError(context_.timer().Wait(gather_));
  storage_.Open(buffer_.data_ptr());
  small_shard_.reset();
}

void FlatGroup::Reshard(bool until_backward) {
  storage_.Seal();
  if (stays_whole_) return;
  if (until_backward && context_.reshard() != nullptr) {
    at::NoGradGuard no_grad;
    trace::MemoryScope scope(trace::MemoryCategory::kUnsharded);
    const int64_t numel = layout_.padded_numel() / context_.reshard()->size();
    small_shard_ = context_.world().Empty({numel}, dtypes_[kParameter]);
    small_shard_.copy_(buffer_.narrow(0, context_.reshard()->rank() * numel, numel));
  }
  context_.unsharded_pool().Give(std::exchange(buffer_, at::Tensor()));
}

void FlatGroup::UpdateFull(const std::function<at::Tensor(const std::string& name)>& find,
                           const Strategy::StateUpdater& update) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> found(size());
  at::Tensor full;
  for (size_t i = 0; i < size(); ++i) {
    found[i] = find(parameters_[i].name);
    if (!found[i].defined()) continue;
    if (!full.defined()) {
      trace::MemoryScope scope(trace::MemoryCategory::kUnsharded);
      full = context_.world().Empty({layout_.padded_numel()}, found[i].scalar_type());
    }
    const FlatLayout::Slice slice = SliceOf(i);
    OwnPart(full).narrow(0, slice.in_shard, slice.numel).copy_(found[i]);
  }
  if (!full.defined()) return;
  ThrowIfError(context_.shard_untimed()
                   .AllGatherInto(full, OwnPart(full), absl::StrCat("state of ", label_))
                   .Wait());
  for (size_t i = 0; i < size(); ++i) {
    if (!found[i].defined()) continue;
    update(parameters_[i].name, ViewOf(full, i));
    const FlatLayout::Slice slice = SliceOf(i);
    found[i].detach().copy_(OwnPart(full).narrow(0, slice.in_shard, slice.numel));
  }
}

void FlatGroup::Restore() {
  size_t i = 0;
  UpdateFull([&](const std::string&) { return slices_[i++].detach(); },
             [&, next = size_t{0}](const std::string&, at::Tensor full) mutable {
               at::Tensor& parameter = parameters_[next++].tensor;
               parameter.set_data(full.to(context_.world().device(), full.scalar_type(),
                                          /*non_blocking=*/false, /*copy=*/true));
             });
}

void FlatGroup::BeginBackward() { arrived_.assign(size(), false); }

void FlatGroup::TakeGradient() {
  stored_.assign(size(), false);
  if (context_.options().sharding != Sharding::kOptimizer) {
    gradient_ = context_.gradient_pool().Take(layout_.padded_numel(), dtypes_[kReduce]);
    return;
  }
  if (!kept_gradient_.defined()) {
    trace::MemoryScope scope(trace::MemoryCategory::kGradients);
    kept_gradient_ = context_.world().Empty({layout_.padded_numel()}, dtypes_[kReduce]);
  }
  gradient_ = kept_gradient_;
  for (const at::Tensor& slice : slices_) {
    at::Tensor& gradient = slice.mutable_grad();  // of steps before, to which this one adds
    if (gradient.defined() && gradient.is_alias_of(gradient_)) gradient = gradient.clone();
  }
}

void FlatGroup::StoreGradient(size_t i) {
  at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
  if (arrived_[i]) throw StatusError(GradientTwiceError(parameters_[i].name));
  arrived_[i] = true;
  if (!gradient.defined()) return;  // a node of the graph that has none to give
  if (gradient.layout() != at::kStrided) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("parameter ", parameters_[i].name,
                     " has a sparse gradient, which cannot be sharded: use dense ones, for an "
                     "Embedding sparse(false)")));
  }
  if (!gradient_.defined()) TakeGradient();
  const trace::Span span("MEMCPY_IN_FUSION_BUFFER", "communication");
  const double scale = ScaleBefore();
  at::Tensor view = ViewOf(gradient_, i);
  if (stored_[i]) {
    view.add_(gradient, scale);
  } else if (gradient.scalar_type() == view.scalar_type() &&
             !at::isReducedFloatingType(view.scalar_type())) {
    at::mul_out(view, gradient, at::Scalar(scale));
  } else {
    view.copy_(gradient).mul_(scale);
  }
  gradient.reset();
  stored_[i] = true;
}

double FlatGroup::ScaleBefore() const {
  const double ranks = context_.world().size();
  // In f16 a sum overflows early, and what is divided by all ranks is soon 0: half of it each.
  if (dtypes_[kReduce] == at::kHalf) return std::exp2(-std::ceil(std::log2(ranks) / 2));
  return 1 / ranks;
}

std::string FlatGroup::ReduceLabel() const {
  const auto missing = std::find(stored_.begin(), stored_.end(), false);
  if (missing == stored_.end()) return label_;
  return absl::StrCat(label_, " without ", parameters_[missing - stored_.begin()].name, " (",
                      std::count(missing, stored_.end(), false), " missing, #",
                      absl::Hex(std::hash<std::vector<bool>>()(stored_)), ")");
}

void FlatGroup::StartReduce() {
  for (size_t i = 0; i < size(); ++i) {
    if (!stored_[i]) ViewOf(gradient_, i).zero_();
  }
  if (kept_gradient_.defined() && dtypes_[kReduce] == dtypes_[kMaster] &&
      !context_.options().cpu_offload) {
    shard_gradient_ = OwnPart(gradient_);
  } else {
    trace::MemoryScope scope(trace::MemoryCategory::kGradients);
    shard_gradient_ = context_.world().Empty({layout_.shard_numel()}, dtypes_[kReduce]);
  }
  const std::string label = ReduceLabel();
  reduce_ =
      context_.shard().ReduceScatterInto(shard_gradient_, gradient_, comm::ReduceOp::kSum, label);
  if (context_.replicas() != nullptr) {
    reduce_ = reduce_.Then(*context_.replicas(), [&](comm::Communicator& replicas) {
      return replicas.AllReduce(shard_gradient_, comm::ReduceOp::kSum, label);
    });
  }
  reducing_ = true;
}

void FlatGroup::FinishReduce() {
  ThrowIfError(context_.timer().Wait(reduce_));
  reducing_ = false;
  if (!kept_gradient_.defined()) context_.gradient_pool().Give(gradient_);
  gradient_.reset();
  at::Tensor shard_gradient = std::exchange(shard_gradient_, at::Tensor());
  trace::MemoryScope scope(trace::MemoryCategory::kGradients);
  shard_gradient = shard_gradient.to(dtypes_[kMaster]);
  const double scale_after = 1 / (ScaleBefore() * context_.world().size());
  if (scale_after != 1) shard_gradient.mul_(scale_after);
  if (!context_.options().cpu_offload) {
    AddToSlices(shard_gradient);
    return;
  }
  offloaded_ = shard_gradient;
  if (!shard_gradient.is_cpu()) {
    offloaded_ = EmptyOnCpu().copy_(shard_gradient, /*non_blocking=*/true);
  }
  landed_.Record(shard_gradient.device());
}

void FlatGroup::FinishOffload() {
  if (!offloaded_.defined()) return;
  landed_.Wait();
  AddToSlices(std::exchange(offloaded_, at::Tensor()));
}

void FlatGroup::AddToSlices(const at::Tensor& shard_gradient) {
  // Aliases and not autograd's views: LibTorch's zero_grad() detaches gradients in place, which
  // views refuse.
  at::AutoDispatchBelowADInplaceOrView no_views;
  for (size_t i = 0; i < size(); ++i) {
    if (!stored_[i]) continue;
    const FlatLayout::Slice slice = SliceOf(i);
    const at::Tensor part = shard_gradient.narrow(0, slice.in_shard, slice.numel);
    at::Tensor& gradient = slices_[i].mutable_grad();
    if (gradient.defined()) {
      gradient.add_(part);
    } else {
      gradient = part;
    }
  }
}

void FlatGroup::DropGradient() {
  offloaded_.reset();
  if (!gradient_.defined()) return;
  if (!kept_gradient_.defined()) context_.gradient_pool().Give(gradient_);
  gradient_.reset();
}

void FlatGroup::CheckRequiresGrad() const {
  for (const NamedTensor& parameter : parameters_) {
    if (parameter.tensor.requires_grad() == requires_grad_) continue;
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        "requires_grad of parameter ", parameter.name,
        " has changed since Fsdp sharded it: freeze and unfreeze before, and make another Fsdp")));
  }
}

void FlatGroup::BlockGradients() {
  if (!requires_grad_) return;
  if (blocked_.empty()) {
    for (const NamedTensor& parameter : parameters_) {
      blocked_.push_back(blocked_storage_.Tensor(parameter.tensor.sizes(), dtypes_[kParameter]));
    }
  }
  for (size_t i = 0; i < size(); ++i) parameters_[i].tensor.mutable_grad() = blocked_[i];
}

void FlatGroup::UnblockGradients() {
  for (size_t i = 0; i < blocked_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (gradient.is_same(blocked_[i])) gradient.reset();
  }
}

}  // namespace lockstep::parallel::fsdp
