#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/recompute.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/model_cases.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {
namespace {

// Each strategy with recomputation equals one process without.
void ExpectParity(const ParityCase& c, const std::function<bool(const NamedUnit&)>& which) {
  for (int size : {2, 3}) {
    const Trajectory expected = TrainAlone(c, size);
    for (const std::string name : {"none", "manual", "ddp", "fsdp"}) {
      const int ranks = name == "none" ? 1 : size;
      ParityCase part = c;
      if (name == "none") part.batch = c.batch * size;
      std::vector<ParityModel> models;
      for (int rank = 0; rank < ranks; ++rank) {
        models.push_back(MakeModel(part));
        Recompute(*models.back().module, which);
      }
      comm::testing::RunRanks(ranks, [&](comm::Communicator& comm) {
        const ParityModel& model = models[comm.rank()];
        auto strategy = ValueOrThrow(MakeStrategy(name, model.module, &comm));
        const Trajectory found = Train(part, model, *strategy, comm.rank(), ranks, &comm);
        ExpectSame(found, expected, c.dtype,
                   c.name + " recomputed under " + name + ", rank " + std::to_string(comm.rank()) +
                       " of " + std::to_string(ranks));
      });
    }
  }
}

bool All(const NamedUnit&) { return true; }
bool Blocks(const NamedUnit& unit) { return unit.name.find("block") == 0; }

ParityCase OddCase() {
  ParityCase c = {.name = "odd", .sample_shape = {17}, .classes = 5};
  c.make = [] {
    OddNet net(/*blocks=*/3);
    return ParityModel{net.ptr(), [net](at::Tensor x) mutable { return net(x); }};
  };
  return c;
}

TEST(RecomputeParityTest, Blocks) { ExpectParity(OddCase(), Blocks); }

TEST(RecomputeParityTest, OuterBlocksAlone) {
  ExpectParity(OddCase(), [](const NamedUnit& unit) {
    return Blocks(unit) && unit.name.find(".up") == std::string::npos;
  });
}

TEST(RecomputeParityTest, NestedToTheModelItself) { ExpectParity(OddCase(), All); }

TEST(RecomputeParityTest, SeveralBackwardsAndClipping) {
  ParityCase c = OddCase();
  c.micro_steps = 3;
  c.clip_norm = 0.5;
  ExpectParity(c, Blocks);
}

TEST(RecomputeParityTest, Vit) { ExpectParity(ModelCase("vit", at::kDouble), Blocks); }

}  // namespace
}  // namespace lockstep::parallel::testing
