#include "lockstep/parallel/ddp/ddp.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/counting.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

using comm::OperationKind;
using testing::MakeNets;
using testing::OddNet;

struct Counted {
  std::shared_ptr<comm::TrafficCounters> counters = std::make_shared<comm::TrafficCounters>();
  std::unique_ptr<comm::Communicator> comm;
  explicit Counted(comm::Communicator& world)
      : comm(std::make_unique<comm::CountingCommunicator>(SplitPrivate(world), counters)) {}
};

int64_t Numel(torch::nn::Module& model) {
  int64_t numel = 0;
  for (const at::Tensor& parameter : model.parameters()) numel += parameter.numel();
  return numel;
}

TEST(DdpTest, EqualsOneProcessWithEveryOption) {
  const std::map<std::string, DdpOptions> cases = {
      {"defaults", {}},
      {"a bucket a parameter", {.first_bucket_bytes = 1, .bucket_bytes = 1}},
      {"small buckets", {.first_bucket_bytes = 1, .bucket_bytes = 1000}},
      {"no buffers", {.bucket_bytes = 100, .broadcast_buffers = false}},
      {"find_unused", {.first_bucket_bytes = 1, .find_unused_parameters = true}},
      {"static_graph", {.first_bucket_bytes = 1, .bucket_bytes = 1000, .static_graph = true}},
      {"both", {.bucket_bytes = 100, .find_unused_parameters = true, .static_graph = true}},
  };
  for (const auto& [name, options] : cases) {
    for (const int micro_steps : {1, 3}) {
      for (const int size : {1, 2, 3}) {
        testing::ParityCase c = {.name = name,
                                 .sample_shape = {17},
                                 .classes = 5,
                                 .micro_steps = micro_steps,
                                 .clip_norm = micro_steps > 1 ? 0.5 : 0};
        c.make = [] {
          OddNet net(2);
          return testing::ParityModel{net.ptr(), [net](at::Tensor x) mutable { return net(x); }};
        };
        const testing::Trajectory expected = testing::TrainAlone(c, size);
        std::vector<testing::ParityModel> models;
        for (int rank = 0; rank < size; ++rank) models.push_back(testing::MakeModel(c));
        comm::testing::RunRanks(size, [&, &options = options](comm::Communicator& comm) {
          Ddp ddp(models[comm.rank()].module, comm, options);
          ExpectSame(testing::Train(c, models[comm.rank()], ddp, comm.rank(), size, &comm),
                     expected, c.dtype, absl::StrCat(c.name, ", ", size, " ranks"));
        });
      }
    }
  }
}

TEST(DdpTest, StartsFromRankZeroAndSendsFourBytesAParameter) {
  std::vector<OddNet> nets = MakeNets(3);
  comm::testing::RunRanks(3, [&](comm::Communicator& world) {
    OddNet& net = nets[world.rank()];
    Counted counted(world);
    Ddp ddp(net, *counted.comm, {.first_bucket_bytes = 400, .bucket_bytes = 1000});
    at::Tensor sum = net->in->weight.detach().sum();
    at::Tensor root = sum.clone();
    ThrowIfError(world.Broadcast(root, 0).Wait());
    EXPECT_TRUE(sum.equal(root));

    const auto parameters = static_cast<int64_t>(net->parameters().size());
    for (int step = 0; step < 3; ++step) {
      counted.counters->Reset();
      net(at::ones({2, 17})).sum().backward();
      const comm::Traffic reduced = (*counted.counters)[OperationKind::kAllReduce];
      EXPECT_EQ(reduced.payload_bytes, 4 * Numel(*net));
      EXPECT_EQ(reduced.operations, 3);
      // The buffer, 16 bytes with its padding, and once the order in which gradients arrived.
      const comm::Traffic copied = (*counted.counters)[OperationKind::kBroadcast];
      EXPECT_EQ(copied.operations, step == 0 ? 2 : 1);
      EXPECT_EQ(copied.payload_bytes, 16 + (step == 0 ? 8 * parameters : 0));
      const comm::Traffic total = counted.counters->total();
      EXPECT_EQ(total.operations, reduced.operations + copied.operations);
      EXPECT_EQ(ddp.last_step().collectives, total.operations);
      EXPECT_EQ(ddp.last_step().payload_bytes, total.payload_bytes);
      EXPECT_GE(ddp.last_step().backward, ddp.last_step().exposed);
      EXPECT_GE(ddp.last_step().communication, ddp.last_step().exposed);
    }
  });
}

TEST(DdpTest, CommunicatesWhileBackwardRuns) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& world) {
    OddNet& net = nets[world.rank()];
    Counted counted(world);
    Ddp ddp(net, *counted.comm,
            {.first_bucket_bytes = 1, .bucket_bytes = 1, .broadcast_buffers = false});
    net(at::ones({2, 17})).sum().backward();
    net->zero_grad();
    counted.counters->Reset();
    int64_t before_the_first_layer = -1;
    auto hook = net->blocks[0]->AddPreForwardHook([&](const std::vector<at::Tensor*>& inputs) {
      inputs[0]->register_hook([&](const at::Tensor&) {
        before_the_first_layer = counted.counters->total().operations;
      });
    });
    net(at::ones({2, 17})).sum().backward();
    // Every parameter has a bucket of its own; only in.weight and in.bias were to come.
    EXPECT_EQ(before_the_first_layer, counted.counters->total().operations - 2);
  });
}

TEST(DdpTest, GradientsAliasTheBucket) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Ddp ddp(net, comm);
    net(at::ones({2, 17})).sum().backward();
    const auto parameters = ddp.parameters();
    for (const at::Tensor& parameter : parameters) {
      EXPECT_TRUE(parameter.grad().is_alias_of(parameters[0].grad()));
    }
    // Zeroed in place, or not at all, they accumulate there.
    const at::Tensor once = net->out->weight.grad().clone();
    net(at::ones({2, 17})).sum().backward();
    EXPECT_TRUE(net->out->weight.grad().allclose(2 * once));
  });
}

TEST(DdpTest, NamesTheFirstParameterInWhichModelsDiffer) {
  std::vector<OddNet> nets = MakeNets(3);
  nets[2]->blocks[1]->down->to(at::kDouble);
  comm::testing::RunRanks(3, [&](comm::Communicator& comm) {
    try {
      Ddp ddp(nets[comm.rank()], comm);
      ADD_FAILURE() << "did not throw";
    } catch (const StatusError& error) {
      EXPECT_EQ(std::string{error.status().message()},
                "the ranks' models differ: rank 0 has parameter block1.down.weight: Float [7, 15], "
                "trainable; rank 2 has parameter block1.down.weight: Double [7, 15], trainable");
    }
  });
}

TEST(DdpTest, NamesAParameterWithoutAGradient) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Ddp ddp(net, comm);
    try {
      net->in->forward(at::ones({2, 17})).sum().backward();
      ADD_FAILURE() << "did not throw";
    } catch (const StatusError& error) {
      if (error.status().code() == absl::StatusCode::kAborted) return;  // the other was first
      EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_NE(std::string(error.what()).find("parameter block0.scale got no gradient"),
                std::string::npos)
          << error.what();
    }
  });
}

TEST(DdpTest, AFrozenParameterIsLeftAlone) {
  std::vector<OddNet> nets = MakeNets(2);
  for (OddNet& net : nets) net->in->weight.set_requires_grad(false);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Ddp ddp(net, comm, {.broadcast_buffers = false});
    for (int step = 0; step < 2; ++step) net(at::ones({2, 17})).sum().backward();
    EXPECT_FALSE(net->in->weight.grad().defined());
    EXPECT_EQ(ddp.last_step().payload_bytes, 4 * (Numel(*net) - 17 * 15));
  });
}

}  // namespace
}  // namespace lockstep::parallel
