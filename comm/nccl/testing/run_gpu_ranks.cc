#include "lockstep/comm/nccl/testing/run_gpu_ranks.h"

#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

#include "lockstep/comm/nccl/background.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/comm/nccl/cuda_library.h"
#include "lockstep/comm/nccl/nccl_communicator.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm::nccl::testing {

void RunGpuRanks(int size, const std::function<void(Communicator&)>& body, const Options& options) {
  const int visible = CountDevices();
  if (visible == 0) GTEST_SKIP() << "needs GPUs, " << size << " of them: " << CheckDevices();
  if (visible < size)
    GTEST_SKIP() << "needs " << size << " GPUs, and this process sees " << visible;
  std::printf("on %d of %d GPUs\n", size, visible);
  const auto store = Store::InProcess();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const c10::DeviceGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank)));
      auto comm = CreateOn(CudaLibrary(rank), *store, rank, size, options);
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
  EXPECT_TRUE(WaitForBackground(absl::Seconds(30))) << "threads are still running";
}

}  // namespace lockstep::comm::nccl::testing
