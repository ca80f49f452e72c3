#include "lockstep/parallel/checkpoint/stop.h"

#include <ATen/ops/full.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <utility>

#include "absl/time/clock.h"

namespace lockstep::parallel::checkpoint {
namespace {

constexpr std::array<int, 2> kSignals = {SIGTERM, SIGUSR1};

std::atomic<bool> signalled = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // handlers may do nothing else

std::array<struct sigaction, kSignals.size()> before;

}  // namespace

absl::StatusOr<std::unique_ptr<StopRequest>> StopRequest::Watch(comm::Communicator& comm,
                                                                absl::Duration limit) {
  auto own = comm.Split(/*color=*/0, /*key=*/comm.rank());
  if (!own.ok()) return own.status();
  return std::unique_ptr<StopRequest>(new StopRequest(*std::move(own), limit));
}

StopRequest::StopRequest(std::unique_ptr<comm::Communicator> comm, absl::Duration limit)
    : comm_(std::move(comm)), end_(absl::Now() + limit) {
  signalled = false;
  struct sigaction action = {};
  action.sa_handler = [](int) { signalled = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &before[i]);
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before[i], nullptr);
}

absl::StatusOr<bool> StopRequest::Requested() {
  const bool mine = signalled || absl::Now() >= end_;
  const at::Tensor any =
      at::full({1}, mine ? 1 : 0, at::TensorOptions().dtype(at::kByte).device(comm_->device()));
  const absl::Status status = comm_->AllReduce(any, comm::ReduceOp::kMax).Wait();
  if (!status.ok()) return status;
  return any.cpu().const_data_ptr<uint8_t>()[0] != 0;
}

}  // namespace lockstep::parallel::checkpoint
