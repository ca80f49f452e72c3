#include "lockstep/comm/testing/run_ranks.h"

#include <gtest/gtest.h>

#include <exception>
#include <thread>
#include <vector>

#include "lockstep/comm/inprocess/inprocess_communicator.h"

namespace lockstep::comm::testing {

void RunRanks(int size, const std::function<void(Communicator&)>& body, absl::Duration deadline) {
  auto comms = inprocess::Create(size, {.deadline = deadline});
  std::vector<std::thread> threads;
  for (auto& comm : comms) {
    threads.emplace_back([&body, &comm] {
      try {
        body(*comm);
      } catch (const std::exception& error) {
        comm->Abort(absl::InternalError(error.what()));
        ADD_FAILURE() << "rank " << comm->rank() << " of " << comm->size() << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lockstep::comm::testing
