#pragma once

#include <c10/core/Device.h>

#include <functional>

namespace lockstep::comm::testing {

// A device of LibTorch's that is not the CPU, on machines that have none: tensors there have memory
// of the host, and are computed by the CPU's kernels, on copies. Like a GPU it is left by
// tensor.cpu() only, so that code which gives a tensor of the CPU to a communicator of a GPU, or
// looks at data where only kernels may, fails in a test. Backward runs on threads of the
// device's own, as it does for GPUs. Kernels run at once, not queued on a stream.
//
//   at::Tensor x = at::ones({3}, comm::testing::HostDevice(rank));
//   comm->AllReduce(x, ReduceOp::kSum);
//
// There are kHostDevices of them. Ranks that are threads need one each, as their backwards would
// wait for each other on one thread. They take the place of LibTorch's
// HPUs, which its own builds have no code for.
inline constexpr int kHostDevices = 8;
at::Device HostDevice(int index);

// How often an event was recorded, read or freed while its thread's current device was another one.
// On a GPU that makes a context on the other, too.
int EventsOnOtherDevices();

// How often the host has waited for such a device: for an event, a stream or all of it.
int EventsWaitedFor();

// While it lives, events that this thread records are reached when `queue` runs what it is given,
// in order; else at once. With comm/nccl/testing/fake_library.h:
//
//   QueuedStream stream(fabric, rank);
//   const QueuedEvents events([&](std::function<void()> reach) { stream.Run(std::move(reach)); });
class QueuedEvents {
 public:
  using Queue = std::function<void(std::function<void()> reach)>;

  explicit QueuedEvents(Queue queue);
  ~QueuedEvents();
  QueuedEvents(const QueuedEvents&) = delete;
  QueuedEvents& operator=(const QueuedEvents&) = delete;

 private:
  const Queue queue_;
  const Queue* const previous_;
};

}  // namespace lockstep::comm::testing
