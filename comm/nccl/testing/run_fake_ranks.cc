#include "lockstep/comm/nccl/testing/run_fake_ranks.h"

#include <gtest/gtest.h>

#include <exception>
#include <thread>
#include <vector>

#include "lockstep/comm/nccl/background.h"
#include "lockstep/comm/nccl/nccl_communicator.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm::nccl::testing {

Options FastOptions(absl::Duration deadline) {
  return {.deadline = deadline,
          .poll_interval = absl::Milliseconds(1),
          .control_interval = absl::Milliseconds(50)};
}

void RunFakeRanks(int size, const std::function<void(Communicator&)>& body, const Options& options,
                  const std::function<at::Device(int rank)>& device_of) {
  FakeFabric fabric(size, device_of);
  RunFakeRanksOn(fabric, size, body, options);
}

void RunFakeRanksOn(FakeFabric& fabric, int size, const std::function<void(Communicator&)>& body,
                    const Options& options) {
  const auto store = Store::InProcess();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto comm = CreateOn(fabric.library(rank), *store, rank, size, options);
      if (!comm.ok()) {
        ADD_FAILURE() << "rank " << rank << " of " << size << ": " << comm.status();
        return;
      }
      try {
        body(**comm);
      } catch (const std::exception& error) {
        (*comm)->Abort(absl::InternalError(error.what()));
        ADD_FAILURE() << "rank " << rank << " of " << size << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectNothingLeft(fabric);
}

void ExpectNothingLeft(const FakeFabric& fabric) {
  EXPECT_TRUE(WaitForBackground(absl::Seconds(30))) << "threads are still running";
  const LiveCounts live = fabric.live();
  EXPECT_EQ(live.communicators, 0);
  EXPECT_EQ(live.streams, 0);
  EXPECT_EQ(live.events, 0);
  EXPECT_EQ(fabric.misuses(), 0);
}

}  // namespace lockstep::comm::nccl::testing
