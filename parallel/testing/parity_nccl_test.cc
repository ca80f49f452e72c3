#include <gtest/gtest.h>

#include <mutex>

#include "lockstep/comm/nccl/testing/run_fake_ranks.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/model_cases.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {
namespace {

// Over NCCL's fake, whose operations run later and on other threads.
TEST(ParityNcclTest, EqualsOneProcess) {
  for (const int size : {1, 2, 3, 4}) {
    const ParityCase c = ModelCase("mlp", at::kDouble);
    const Trajectory expected = TrainAlone(c, size);
    for (const char* name : {"manual", "ddp", "zero2", "fsdp"}) {
      std::mutex making;
      comm::nccl::testing::RunFakeRanks(size, [&](comm::Communicator& world) {
        ParityModel made;
        {
          std::lock_guard<std::mutex> lock(making);
          made = MakeModel(c);
        }
        auto strategy = ValueOrThrow(MakeStrategy(name, made.module, &world));
        ExpectSame(Train(c, made, *strategy, world.rank(), size, &world), expected, c.dtype, name);
      });
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel::testing
