#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/work.h"
#include "lockstep/parallel/fsdp/flat_layout.h"
#include "lockstep/parallel/fsdp/sealed_storage.h"
#include "lockstep/parallel/fsdp/shard_context.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/tools/device/stream_mark.h"

namespace lockstep::parallel::fsdp {

// The parameters of one Unit that share a dtype and requires_grad, as one flat buffer of which this
// rank keeps its shard.
//
// While unsharded, the parameters are views of a full buffer; while sharded, they keep their
// shapes, but their storage is sealed. It is the same StorageImpl all the time, whose data pointer
// is swapped: so whatever autograd has saved of a parameter, itself or a view, sees the data again
// when it is back. Data is written behind autograd's back; version counters do not move.
//
// Steps: StartUnshard, FinishUnshard, (forward or backward), Reshard; and for gradients
// BeginBackward, StoreGradient for each parameter, StartReduce, FinishReduce, FinishOffload.
class FlatGroup {
 public:
  // Takes over the parameters: afterwards they are sharded; each original is freed before the next
  // one's turn. `context` outlives this.
  FlatGroup(std::vector<NamedTensor> parameters, ShardContext& context);
  FlatGroup(FlatGroup&&) = default;
  ~FlatGroup();

  // What messages and labels of collectives say.
  void SetNames(const std::string& unit, const std::vector<std::string>& parameters);

  size_t size() const { return parameters_.size(); }
  const NamedTensor& parameter(size_t i) const { return parameters_[i]; }
  bool requires_grad() const { return requires_grad_; }

  // This rank's part of parameter i: 1-D, maybe empty, a leaf for the optimizer.
  const at::Tensor& slice(size_t i) const { return slices_[i]; }

  // Where slice(i) begins in the flattened parameter; 0 where it is empty.
  int64_t slice_offset(size_t i) const { return SliceOf(i).in_parameter; }

  // Issues the all-gather; FinishUnshard() waits for it, throws on errors, and makes the parameters
  // see it.
  void StartUnshard();
  void FinishUnshard();

  // Seals the parameters, and frees them where they do not stay whole. Changes to them are lost.
  // `until_backward`: keeps what a gather over fewer ranks needs, see FsdpOptions::reshard_size;
  // until the next gather, or ForgetForward().
  void Reshard(bool until_backward);

  // Drops what Reshard() has kept for a backward: parameters may have changed since.
  void ForgetForward() { small_shard_.reset(); }

  // Gathers, of tensors that lie as the slices do, those that `find` has for the parameters' names,
  // calls `update` with each, whole, and takes this rank's parts of what it has left. Collective.
  void UpdateFull(const std::function<at::Tensor(const std::string& name)>& find,
                  const Strategy::StateUpdater& update);

  // Gives the parameters memory of their own again, as if this group had not been. Collective.
  void Restore();

  void BeginBackward();

  // Moves parameter i's .grad, divided by the number of ranks, into a flat gradient, or adds it to
  // what is there.
  void StoreGradient(size_t i);
  bool has_gradients() const { return gradient_.defined() && !reducing_; }

  // Issues the reduce-scatter; FinishReduce() waits for it, throws on errors, and adds the result
  // to the .grad of the slices whose parameters got a gradient. Under FsdpOptions::cpu_offload it
  // only asks for the copy to the CPU, and FinishOffload() waits for that and adds.
  void StartReduce();
  void FinishReduce();
  void FinishOffload();

  // Blocks until the device has read the shard, which is on the CPU, so that it may be changed.
  void WaitForUpload() { uploaded_.Wait(); }

  // Forgets gradients that wait to be reduced.
  void DropGradient();

  // FailedPrecondition (StatusError) where a parameter was frozen or unfrozen since.
  void CheckRequiresGrad() const;

  // Until UnblockGradients(), the parameters have a .grad that throws when somebody reads it: an
  // optimizer of the parameters, which would find no gradient and do nothing.
  void BlockGradients();
  void UnblockGradients();

 private:
  FlatLayout::Slice SliceOf(size_t i) const { return layout_.slice(i, shard_rank_); }
  at::Tensor ViewOf(const at::Tensor& flat, size_t i) const;
  at::Tensor OwnPart(const at::Tensor& flat) const;
  at::Tensor EmptyOnCpu() const;
  void AddToSlices(const at::Tensor& shard_gradient);
  void TakeGradient();
  double ScaleBefore() const;  // of what is reduced; the rest of 1 / ranks comes after
  std::string ReduceLabel() const;

  ShardContext& context_;
  std::vector<NamedTensor> parameters_;
  std::vector<at::ScalarType> dtypes_;  // that of the shard, of parameters and of reduction
  FlatLayout layout_;
  int shard_rank_;
  bool requires_grad_;
  bool stays_whole_;  // parameters do, always
  bool staged_;       // the shard has another dtype or device than the full buffer
  std::string label_;
  SealedStorage storage_;  // the parameters'
  SealedStorage blocked_storage_;
  at::Tensor buffer_;  // what storage_ points to while unsharded
  at::Tensor shard_;
  at::Tensor small_shard_;  // of fewer ranks, between forward and backward
  std::vector<at::Tensor> slices_;
  std::vector<at::Tensor> blocked_;
  at::Tensor gradient_;        // full, while gradients arrive and are reduced
  std::vector<bool> arrived_;  // in this backward
  std::vector<bool> stored_;   // in gradient_
  at::Tensor kept_gradient_;   // Sharding::kOptimizer: gradient_'s memory
  at::Tensor shard_gradient_;
  comm::Work gather_;
  comm::Work reduce_;
  bool reducing_ = false;
  at::Tensor offloaded_;  // a reduced gradient, when `landed_` on the CPU
  device::StreamMark landed_;
  device::StreamMark uploaded_;
};

}  // namespace lockstep::parallel::fsdp
