#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include "lockstep/comm/communicator.h"

namespace lockstep::parallel {

// Batch normalization over the batches of all ranks together: what one process with the whole batch
// computes, where BatchNorm under DDP would normalize each rank's part by itself.
//
//   std::shared_ptr<comm::Communicator> norms = parallel::SplitPrivate(comm);  // for all of them
//   struct NetImpl : torch::nn::Module {
//     explicit NetImpl(std::shared_ptr<comm::Communicator> norms)
//         : norm(register_module("norm", SyncBatchNorm(torch::nn::BatchNormOptions(64), norms))) {}
//     at::Tensor forward(at::Tensor x) { return norm(conv(x)); }
//     ...
//   };
//   parallel::Ddp ddp(net, comm);
//
// Options, parameters and buffers are those of torch::nn::BatchNorm1d to 3d, by the same names
// (weight, bias, running_mean, running_var, num_batches_tracked): weights go from one to the other.
// Input: (N, C, ...) of any rank from 2 up, f32, f64, f16 or bf16; output: the same. N may differ
// between ranks and be 0 on some. Statistics are combined in f64 from each rank's count, mean and
// sum of squared deviations (Chan, Golub and LeVeque, 1979), on all ranks alike, bit for bit.
//
// In training, forward gathers 2 C + 1 numbers a rank and backward reduces 2 C. In evaluation, and
// without running statistics, it is BatchNorm, and no rank waits for another.
//
// GRADIENTS. That of the input is the gradient of the sum of all ranks' losses, those of weight and
// bias are this rank's part of it: DDP, which averages them, then gives the gradient of the losses'
// mean. Double backward is not supported.
//
// ORDER. Modules share `comm`, and nothing else may use it: their operations run in the order of
// forward and of backward, which must be the same on all ranks, so every rank runs all of the
// norms, with 0 rows where it has no more. DDP's buckets are on a communicator of their own and are
// started amid these; how the two interleave depends on the graph alone, and so is the same on all
// ranks unless find_unused_parameters is needed on some only. Operations on the CPU's backends go
// on beside each other in any case: a norm that waits does not hold back a bucket, nor the
// reverse. On a backend that runs communicators one after the other, ranks whose unused parameters
// differ could wait for each other.
//
// THERE IS NO CONVERSION of a model that was built with BatchNorm, as Python has it: a C++ module
// calls its layers through typed members, which replace_module() leaves as they were, and
// BatchNorm's forward is not virtual. Build the model with SyncBatchNorm; on one rank it computes
// what BatchNorm does.
//
// ERRORS. c10::Error, as BatchNorm has it, where the ranks together have fewer than two values a
// channel; StatusError, out of forward or backward, where the communicator fails.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                    std::shared_ptr<comm::Communicator> comm);

  at::Tensor forward(const at::Tensor& input);

  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  std::shared_ptr<comm::Communicator> comm_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace lockstep::parallel
