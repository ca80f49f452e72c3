#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/fsdp/buffer_pool.h"
#include "lockstep/parallel/fsdp/flat_layout.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::fsdp {

// The parameters of one Unit that share a dtype and requires_grad, as one flat buffer of which this
// rank keeps its shard.
//
// While unsharded, the parameters are views of a full buffer; while sharded, they keep their
// shapes, but their storage has no memory. It is the same StorageImpl all the time, whose data
// pointer is swapped: so whatever autograd has saved of a parameter, itself or a view, sees the
// data again when it is back. Data is written behind autograd's back; version counters do not move.
//
// Steps: StartUnshard, FinishUnshard, (forward or backward), Reshard; and for gradients
// StoreGradient for each parameter, StartReduce, FinishReduce.
class FlatGroup {
 public:
  // Takes over the parameters: afterwards they are sharded. `comm` outlives this.
  FlatGroup(std::vector<NamedTensor> parameters, comm::Communicator& comm);
  FlatGroup(FlatGroup&&) = default;
  ~FlatGroup();

  size_t size() const { return parameters_.size(); }
  const NamedTensor& parameter(size_t i) const { return parameters_[i]; }
  bool requires_grad() const { return requires_grad_; }

  // This rank's part of parameter i: 1-D, maybe empty, a leaf for the optimizer.
  const at::Tensor& slice(size_t i) const { return slices_[i]; }

  // Where slice(i) begins in the flattened parameter; 0 where it is empty.
  int64_t slice_offset(size_t i) const { return layout_.slice(i, comm_.rank()).in_parameter; }

  int64_t full_bytes() const { return layout_.padded_numel() * full_.element_size(); }

  // Issues the all-gather into a buffer of `pool`; when the work is done, FinishUnshard() makes the
  // parameters see it.
  comm::Work StartUnshard(BufferPool& pool);
  void FinishUnshard();

  // Gives the buffer back. Changes to the unsharded parameters are lost.
  void Reshard(BufferPool& pool);

  // Takes over this rank's part of the unsharded parameters' values.
  void StoreShard();

  // Moves parameter i's .grad, divided by the number of ranks, into a flat gradient.
  void StoreGradient(size_t i, BufferPool& pool);
  bool has_gradient(size_t i) const { return gradient_.defined() && stored_[i]; }
  bool has_gradients() const { return gradient_.defined(); }

  // Issues the reduce-scatter; parameters without a gradient count as zero. FinishReduce(), when
  // the work is done, adds the result to the slices' .grad.
  comm::Work StartReduce();
  void FinishReduce(BufferPool& pool);

 private:
  at::Tensor ViewOf(const at::Tensor& flat, size_t i) const;

  comm::Communicator& comm_;
  const std::vector<NamedTensor> parameters_;
  const FlatLayout layout_;
  const bool requires_grad_;
  at::Tensor full_;    // its storage is the parameters'
  at::Tensor buffer_;  // what full_ points to while unsharded, or is to after FinishUnshard()
  at::Tensor shard_;
  std::vector<at::Tensor> slices_;
  at::Tensor gradient_;  // full, while gradients arrive and are reduced
  std::vector<bool> stored_;
  at::Tensor shard_gradient_;
};

}  // namespace lockstep::parallel::fsdp
