// Trains a model of this project's own on several ranks, first with DDP and then with FSDP, and
// fails unless the loss falls and both agree at every step.
//
//   bazel run //:train          # starts its ranks itself

#include <ATen/core/Tensor.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/launch/relaunch.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/unit.h"
#include "lockstep/tools/status/status_error.h"

namespace consumer {
namespace {

namespace comm = lockstep::comm;
namespace parallel = lockstep::parallel;

class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl(int64_t in, int64_t out)
      : linear_(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(at::Tensor x) { return at::tanh(linear_(x)); }

 private:
  torch::nn::Linear linear_;
};
using Layer = parallel::Unit<LayerImpl>;

class SurrogateImpl : public torch::nn::Module {
 public:
  SurrogateImpl()
      : first_(register_module("first", Layer(7, 33))),
        second_(register_module("second", Layer(33, 33))),
        head_(register_module("head", torch::nn::Linear(33, 1))) {}
  at::Tensor forward(at::Tensor x) { return head_(second_(first_(x))); }

 private:
  Layer first_;
  Layer second_;
  torch::nn::Linear head_;
};
using Surrogate = parallel::Unit<SurrogateImpl>;

// Losses of each step, as means over all ranks.
template <typename Strategy>
std::vector<double> Train(comm::Communicator& comm) {
  torch::manual_seed(7);
  Surrogate model;
  model->to(at::kDouble);
  Strategy strategy(model, comm);
  torch::optim::AdamW optimizer(strategy.parameters(), torch::optim::AdamWOptions(1e-2));
  torch::manual_seed(100 + comm.rank());  // each rank has data of its own
  const at::Tensor inputs = at::randn({64, 7}, at::kDouble);
  const at::Tensor targets = inputs.sin().sum(/*dim=*/1, /*keepdim=*/true);
  std::vector<double> losses;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = at::mse_loss(model(inputs), targets);
    loss.backward();
    optimizer.step();
    at::Tensor mean = loss.detach().clone();
    lockstep::ThrowIfError(comm.AllReduce(mean, comm::ReduceOp::kAverage).Wait());
    losses.push_back(mean.item<double>());
  }
  return losses;
}

int Main() {
  const auto world = lockstep::ValueOrThrow(lockstep::launch::Detect());
  const std::unique_ptr<comm::Communicator> comm = lockstep::ValueOrThrow(comm::mpi::Create(world));
  const std::vector<double> ddp = Train<parallel::Ddp>(*comm);
  const std::vector<double> fsdp = Train<parallel::Fsdp>(*comm);
  bool agree = true;
  for (size_t step = 0; step < ddp.size(); ++step) {
    agree = agree && std::abs(ddp[step] - fsdp[step]) <= 1e-9 * std::abs(ddp[step]);
  }
  const bool falls = ddp.back() < 0.5 * ddp.front();
  if (comm->rank() == 0) {
    std::printf("%d ranks, loss %.6f -> %.6f with DDP, %.6f with FSDP: %s\n", comm->size(),
                ddp.front(), ddp.back(), fsdp.back(), agree && falls ? "good" : "WRONG");
  }
  return agree && falls ? 0 : 1;
}

}  // namespace
}  // namespace consumer

int main(int argc, char** argv) {
  lockstep::launch::RelaunchIfAlone(argc, argv);
  try {
    return consumer::Main();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
