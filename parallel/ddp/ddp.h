#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

namespace ddp {
class CommHook;
class Reducer;
}  // namespace ddp

// The same on all ranks.
struct DdpOptions {
  int64_t first_bucket_bytes = int64_t{1}
                               << 20;        // small, so that communication starts early; 1 MiB
  int64_t bucket_bytes = int64_t{25} << 20;  // of the others; 25 MiB

  // Copies rank 0's buffers (running statistics, ...) to all ranks during each backward that
  // communicates, so that every forward begins with the same ones; true.
  bool broadcast_buffers = true;

  // Backward may leave parameters out, on some ranks or on all, but for one at least on each rank;
  // costs one small all-reduce, and buckets after one with an unused parameter wait for the end of
  // backward; false.
  bool find_unused_parameters = false;

  // Every backward of a rank reaches the same parameters: the first one finds those that are
  // unused, and they cost nothing after it; false.
  bool static_graph = false;

  // Names of parameters and buffers that Ddp neither checks, copies nor averages; none.
  std::vector<std::string> ignored;

  // What averages a bucket: see parallel/ddp/comm_hook.h; an all-reduce.
  std::shared_ptr<ddp::CommHook> comm_hook;
};

// Distributed data parallelism: every rank holds the whole model and sees its part of each batch;
// gradients are averaged while backward still runs.
//
//   Net model;
//   parallel::Ddp ddp(model, comm, {.bucket_bytes = 25 << 20});
//   parallel::optim::FusedAdamW optimizer(ddp.named_parameters(), {.lr = 1e-3});
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     auto loss = cross_entropy(model(batch["images"]), batch["labels"]);
//     loss.backward();                        // gradients are averaged when this returns
//     optimizer.step();
//   }
//
// Any model goes; it need not have Units. Construction is collective: it refuses models and options
// that differ among ranks, and copies rank 0's parameters and buffers to all.
//
// BUCKETS. Parameters are cut into buckets from the last to the first, which is about the order in
// which backward produces their gradients; after the first backward they are cut again in the order
// that rank 0 saw. When a bucket is full, its all-reduce starts. Each gradient is copied once, into
// its bucket, and .grad then is a view of it: no second buffer of the gradients' size stays.
// zero_grad() may drop gradients (the default, and faster) or zero them.
//
// The first backward sends one more message, that order; each one sends the buffers, if there are
// any.
//
// BACKWARD. Several forwards may come before one backward, and parameters may be shared by modules.
// Several backwards in a step add up, under NoSync() with one communication for all. A gradient
// that no rank has stays undefined; one that some have not counts as zero there. Double backward is
// not averaged. Where ranks have different numbers of batches, see parallel/ddp/join.h.
//
// ERRORS (StatusError, out of backward(); the other ranks then fail too, and Ddp is of no further
// use): a parameter got no gradient, or two; a backward() inside backward(); one has become frozen
// or trainable since construction; a sparse gradient; an exception in this backward or an earlier
// one; the communicator failed. Out of the constructor: no trainable parameter, models or options
// that differ, unknown names in `ignored`.
class Ddp : public Strategy {
 public:
  Ddp(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm, DdpOptions options = {});

  template <typename Impl>
  Ddp(const torch::nn::ModuleHolder<Impl>& model, comm::Communicator& comm, DdpOptions options = {})
      : Ddp(std::shared_ptr<torch::nn::Module>(model.ptr()), comm, options) {}

  ~Ddp() override;

  std::string name() const override { return "ddp"; }

 private:
  friend class Join;

  const std::vector<std::string> ignored_;
  std::unique_ptr<ddp::Reducer> reducer_;
};

}  // namespace lockstep::parallel
