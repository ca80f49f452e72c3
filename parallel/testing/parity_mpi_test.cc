#include <gtest/gtest.h>

#include "lockstep/comm/mpi/gtest_main.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/model_cases.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {
namespace {

TEST(ParityMpiTest, EqualsOneProcess) {
  auto world = ValueOrThrow(comm::mpi::Create(comm::mpi::TestWorld()));
  for (const char* model : {"mlp", "convnet", "vit"}) {
    for (at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      const ParityCase c = ModelCase(model, dtype);
      const Trajectory expected = TrainAlone(c, world->size());
      for (const char* name : {"manual", "ddp", "zero1", "zero2", "fsdp"}) {
        const ParityModel made = MakeModel(c);
        auto strategy = ValueOrThrow(MakeStrategy(name, made.module, world.get()));
        const Trajectory found =
            Train(c, made, *strategy, world->rank(), world->size(), world.get());
        ExpectSame(found, expected, dtype, std::string(model) + " under " + name);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel::testing
