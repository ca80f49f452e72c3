#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

namespace ddp {
class Reducer;
}

struct DdpOptions {
  int64_t first_bucket_bytes = int64_t{1}
                               << 20;        // small, so that communication starts early; 1 MiB
  int64_t bucket_bytes = int64_t{25} << 20;  // of the others; 25 MiB
};

// Distributed data parallelism: every rank holds the whole model and sees its part of each batch;
// gradients are averaged while backward still runs.
//
//   Net model;
//   parallel::Ddp ddp(model, comm, {.bucket_bytes = 25 << 20});
//   torch::optim::AdamW optimizer(ddp.parameters(), 1e-3);
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     auto loss = cross_entropy(model(batch["images"]), batch["labels"]);
//     loss.backward();                        // gradients are averaged when this returns
//     optimizer.step();
//   }
//
// Construction is collective and copies rank 0's parameters and buffers to all. Parameters are cut
// into buckets from the last to the first, which is about the order in which backward produces
// their gradients; when a bucket is full, its all-reduce starts. Each gradient is copied once,
// divided on the way, into the bucket, and .grad then is a view of it: no second buffer of the
// gradients' size stays. All ranks must use the same parameters in a backward.
//
// Any model goes; it need not have Units. A backward must reach all trainable parameters; several
// in a step add up, under NoSync() with one communication for all. Double backward is not averaged.
//
// Errors (StatusError, out of backward()): a parameter got no gradient; the communicator failed.
class Ddp : public Strategy {
 public:
  Ddp(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm, DdpOptions options = {});

  template <typename Impl>
  Ddp(const torch::nn::ModuleHolder<Impl>& model, comm::Communicator& comm, DdpOptions options = {})
      : Ddp(std::shared_ptr<torch::nn::Module>(model.ptr()), comm, options) {}

  ~Ddp() override;

  std::string name() const override { return "ddp"; }

 private:
  const std::unique_ptr<comm::Communicator> comm_;
  std::unique_ptr<ddp::Reducer> reducer_;
};

}  // namespace lockstep::parallel
