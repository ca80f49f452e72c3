#include "lockstep/parallel/ddp/sync_batch_norm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

using torch::nn::BatchNormOptions;

constexpr int64_t kChannels = 5;

struct Case {
  std::string name;
  std::vector<int64_t> rows;  // of each rank
  std::vector<int64_t> rest;  // dimensions after the channels
  BatchNormOptions options = BatchNormOptions(kChannels);
  at::ScalarType dtype = at::kDouble;
  double tolerance = 1e-12;
};

// Values far from 0 and of different sizes in the channels.
at::Tensor Values(int64_t rows, const std::vector<int64_t>& rest, int step) {
  std::vector<int64_t> shape = {rows, kChannels};
  shape.insert(shape.end(), rest.begin(), rest.end());
  const int64_t numel =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  std::vector<int64_t> channels(shape.size(), 1);
  channels[1] = kChannels;
  const at::Tensor channel = at::arange(kChannels, at::kDouble).view(channels);
  return at::sin(at::arange(numel, at::kDouble) * 1.7 + step).view(shape) * (channel + 1) +
         channel * 3;
}

// What training leaves behind.
struct Result {
  std::vector<at::Tensor> outputs, input_gradients;
  at::Tensor weight_gradient, bias_gradient;
  at::Tensor running_mean, running_var, num_batches_tracked;
};

// Three steps in training mode, on rows [begin, begin + count) of each step's values.
template <typename Norm>
Result Run(Norm& norm, const Case& c, int64_t begin, int64_t count, int64_t total) {
  norm->to(c.dtype);
  if (c.options.affine()) {
    at::NoGradGuard no_grad;
    norm->weight.copy_(at::arange(kChannels, at::kDouble) * 0.3 + 0.5);
    norm->bias.copy_(at::arange(kChannels, at::kDouble) * 0.1 - 0.2);
  }
  Result result;
  for (int step = 0; step < 3; ++step) {
    // Not contiguous, and a view of rows.
    const at::Tensor all = Values(total, c.rest, step).to(c.dtype).transpose(0, 1).contiguous();
    at::Tensor x = all.transpose(0, 1).narrow(0, begin, count).detach().requires_grad_();
    const at::Tensor y = norm(x);
    EXPECT_EQ(y.scalar_type(), c.dtype);
    const at::Tensor factors = at::sin(Values(total, c.rest, step + 10)).narrow(0, begin, count);
    (y * y * factors.to(c.dtype)).sum().backward();
    result.outputs.push_back(y.detach());
    result.input_gradients.push_back(x.grad());
  }
  if (c.options.affine()) {
    result.weight_gradient = norm->weight.grad();
    result.bias_gradient = norm->bias.grad();
  }
  result.running_mean = norm->running_mean;
  result.running_var = norm->running_var;
  result.num_batches_tracked = norm->num_batches_tracked;
  return result;
}

void ExpectClose(const at::Tensor& found, const at::Tensor& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  if (!expected.defined() || expected.numel() == 0) return;
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  const at::Tensor right = expected.to(at::kDouble);
  const double size = right.abs().max().item<double>();
  EXPECT_LE((found.to(at::kDouble) - right).abs().max().item<double>(), tolerance * (1 + size))
      << what;
}

// The same as torch::nn::BatchNorm over all rows in f64.
void ExpectEqualsOneProcess(const Case& c) {
  const int64_t total = std::accumulate(c.rows.begin(), c.rows.end(), int64_t{0});
  Case exact = c;
  exact.dtype = at::kDouble;
  Result whole;
  if (c.rest.size() == 2) {
    torch::nn::BatchNorm2d norm(c.options);
    whole = Run(norm, exact, 0, total, total);
  } else if (c.rest.size() == 3) {
    torch::nn::BatchNorm3d norm(c.options);
    whole = Run(norm, exact, 0, total, total);
  } else {
    torch::nn::BatchNorm1d norm(c.options);
    whole = Run(norm, exact, 0, total, total);
  }
  const int size = static_cast<int>(c.rows.size());
  std::mutex mutex;
  at::Tensor weight_sum, bias_sum;
  std::vector<at::Tensor> variances(size);
  comm::testing::RunRanks(size, [&](comm::Communicator& comm) {
    const int rank = comm.rank();
    SyncBatchNorm norm(c.options, SplitPrivate(comm));
    const int64_t begin = std::accumulate(c.rows.begin(), c.rows.begin() + rank, int64_t{0});
    const Result part = Run(norm, c, begin, c.rows[rank], total);
    const std::string what = c.name + ", rank " + std::to_string(rank) + ", ";
    for (size_t step = 0; step < whole.outputs.size(); ++step) {
      ExpectClose(part.outputs[step], whole.outputs[step].narrow(0, begin, c.rows[rank]),
                  c.tolerance, what + "output");
      ExpectClose(part.input_gradients[step],
                  whole.input_gradients[step].narrow(0, begin, c.rows[rank]), c.tolerance,
                  what + "gradient of the input");
    }
    ExpectClose(part.running_mean, whole.running_mean, c.tolerance, what + "running_mean");
    ExpectClose(part.running_var, whole.running_var, c.tolerance, what + "running_var");
    ExpectClose(part.num_batches_tracked, whole.num_batches_tracked, 0, what + "batches");
    std::lock_guard<std::mutex> lock(mutex);
    variances[rank] = part.running_var;
    if (!c.options.affine()) return;
    weight_sum = weight_sum.defined() ? weight_sum + part.weight_gradient : part.weight_gradient;
    bias_sum = bias_sum.defined() ? bias_sum + part.bias_gradient : part.bias_gradient;
  });
  ExpectClose(weight_sum, whole.weight_gradient, c.tolerance, c.name + ", gradient of weight");
  ExpectClose(bias_sum, whole.bias_gradient, c.tolerance, c.name + ", gradient of bias");
  for (const at::Tensor& each : variances) {
    if (c.options.track_running_stats()) {
      EXPECT_TRUE(each.equal(variances[0])) << c.name << ": ranks differ";
    }
  }
}

TEST(SyncBatchNormTest, EqualsOneProcess) {
  for (const Case& c : std::vector<Case>{{.name = "one rank", .rows = {7}, .rest = {3, 4}},
                                         {.name = "two ranks", .rows = {3, 3}, .rest = {3, 4}},
                                         {.name = "three ranks", .rows = {3, 1, 4}, .rest = {3, 4}},
                                         {.name = "no rows on one", .rows = {3, 0, 2}, .rest = {5}},
                                         {.name = "one row each", .rows = {1, 1}, .rest = {}},
                                         {.name = "volumes", .rows = {2, 1}, .rest = {2, 3, 2}}}) {
    ExpectEqualsOneProcess(c);
  }
}

TEST(SyncBatchNormTest, EqualsOneProcessWithEveryOption) {
  const BatchNormOptions options(kChannels);
  for (const Case& c :
       std::vector<Case>{{.name = "plain",
       .rows = {2, 3},
       .rest = {4},
       .options = BatchNormOptions(kChannels).affine(false)},
                         {.name = "no statistics",
                         .rows = {2, 3},
                         .rest = {4},
                         .options = BatchNormOptions(kChannels).track_running_stats(false)},
                         {.name = "cumulative",
                         .rows = {2, 3},
                         .rest = {4},
                         .options = BatchNormOptions(kChannels).momentum(std::nullopt)},
                         {.name = "eps",
                         .rows = {2, 3},
                         .rest = {4},
                         .options = BatchNormOptions(kChannels).eps(0.5).momentum(0.7)}}) {
    ExpectEqualsOneProcess(c);
  }
}

TEST(SyncBatchNormTest, LowerPrecisionStaysAtItsRounding) {
  for (const auto& [dtype, tolerance] : std::vector<std::pair<at::ScalarType, double>>{
           {at::kFloat, 2e-6}, {at::kBFloat16, 3e-2}, {at::kHalf, 4e-3}}) {
    ExpectEqualsOneProcess({.name = c10::toString(dtype),
                            .rows = {3, 0, 2},
                            .rest = {3, 4},
                            .dtype = dtype,
                            .tolerance = tolerance});
  }
}

TEST(SyncBatchNormTest, EvaluatesAsBatchNormOnItsOwn) {
  comm::testing::RunRanks(2, [](comm::Communicator& comm) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), SplitPrivate(comm));
    norm->to(at::kDouble);
    norm(Values(3 + comm.rank(), {4}, 0));
    if (comm.rank() == 1) return;  // a collective would not end
    torch::nn::BatchNorm1d alone{BatchNormOptions(kChannels)};
    alone->to(at::kDouble);
    at::NoGradGuard no_grad;
    const auto own = norm->named_buffers();
    for (auto& each : alone->named_buffers()) each.value().copy_(own[each.key()]);
    norm->eval();
    alone->eval();
    const at::Tensor x = Values(2, {4}, 1);
    EXPECT_TRUE(norm(x).equal(alone(x)));
  });
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const std::shared_ptr<comm::Communicator>& norms) {
    for (int i = 0; i < 4; ++i) {
      const std::string index = std::to_string(i);
      layers.push_back(register_module("layer" + index, torch::nn::Linear(kChannels, kChannels)));
      this->norms.push_back(
          register_module("norm" + index, SyncBatchNorm(BatchNormOptions(kChannels), norms)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) x = at::sin(norms[i](layers[i](x)));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<SyncBatchNorm> norms;
};
TORCH_MODULE(Net);

// Norms' all-reduces and DDP's buckets, of which each parameter has its own, interleave.
TEST(SyncBatchNormTest, TrainsUnderDdp) {
  const auto loss_of = [](Net& net, const at::Tensor& x) { return net(x).square().mean(); };
  const auto start = [](Net& net) {
    net->to(at::kDouble);
    at::NoGradGuard no_grad;
    for (auto& each : net->named_parameters()) {
      each.value().copy_(
          at::sin(at::arange(each.value().numel(), at::kDouble)).view_as(each.value()));
    }
  };
  std::vector<at::Tensor> expected;
  comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
    Net net(std::shared_ptr<comm::Communicator>(SplitPrivate(comm)));
    start(net);
    loss_of(net, Values(9, {}, 0)).backward();
    for (const at::Tensor& each : net->parameters()) expected.push_back(each.grad());
  });
  comm::testing::RunRanks(3, [&](comm::Communicator& comm) {
    Net net(std::shared_ptr<comm::Communicator>(SplitPrivate(comm)));
    start(net);
    Ddp ddp(net, comm, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    loss_of(net, Values(9, {}, 0).narrow(0, 3 * comm.rank(), 3)).backward();
    const std::vector<at::Tensor> parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      ExpectClose(parameters[i].grad(), expected[i], 1e-12, "parameter " + std::to_string(i));
    }
  });
}

TEST(SyncBatchNormTest, HasBatchNormsNamesAndSaysWhatItIs) {
  comm::testing::RunRanks(1, [](comm::Communicator& comm) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), SplitPrivate(comm));
    torch::nn::BatchNorm1d alone{BatchNormOptions(kChannels)};
    EXPECT_EQ(norm->named_parameters().keys(), alone->named_parameters().keys());
    EXPECT_EQ(norm->named_buffers().keys(), alone->named_buffers().keys());
    std::ostringstream text;
    text << norm;
    EXPECT_EQ(text.str(), "lockstep::parallel::SyncBatchNorm(5, eps=1e-05, ranks=1)");
  });
}

TEST(SyncBatchNormTest, RefusesWhatCannotBeNormalized) {
  comm::testing::RunRanks(2, [](comm::Communicator& comm) {
    SyncBatchNorm norm(BatchNormOptions(kChannels), SplitPrivate(comm));
    const auto expect = [&](const at::Tensor& x, const std::string& message) {
      try {
        norm(x);
        ADD_FAILURE() << "no error: " << message;
      } catch (const c10::Error& error) {
        EXPECT_EQ(std::string(error.what_without_backtrace()).substr(0, message.size()), message);
      }
    };
    expect(at::ones({2, 4}),
           "SyncBatchNorm of 5 features takes (N, C, ...) with as many channels, and got [2, 4]");
    expect(at::ones({5}), "SyncBatchNorm of 5 features takes");
    expect(at::ones({comm.rank(), 5}),
           "SyncBatchNorm needs more than one value a channel in training, and all ranks together "
           "have 1");
  });
}

}  // namespace
}  // namespace lockstep::parallel
