#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "lockstep/comm/nccl/library.h"

namespace lockstep::comm::nccl::testing {

// Where a fault strikes: at one kind of call of one rank.
enum class Where {
  kGetUniqueId,
  kInit,
  kSplit,
  kLaunch,  // of a collective, a Send or a Recv
  kFinalize,
  kDestroy,
  kAbort,
  kCreateStream,
  kCreateEvent,
  kRecordEvent,
  kWaitEvent,
  kQueryEvent,
};

enum class What {
  kFails,       // the call returns an error
  kFailsLater,  // the call succeeds; then an error comes up in the background, and nothing ends
  kHangs,       // the call succeeds; what it started never ends, until it is aborted
  kCallHangs,   // the call itself does not return before its communicator is aborted
  kIsDelayed,   // what it started, or closing itself, takes `delay` longer
};

struct Fault {
  int rank = 0;
  Where where = Where::kLaunch;
  int call = 0;  // the how manieth of its kind on this rank, from 0
  What what = What::kFails;
  absl::Duration delay = absl::ZeroDuration();
};

// What NCCL says of the faults.
inline constexpr char kFakeLastError[] = "ncclSocketTryRecv: Connection reset by fake";

// What was made and not destroyed, of all ranks.
struct LiveCounts {
  int streams = 0;
  int events = 0;
  int communicators = 0;
};

struct FakeState;

// Where all ranks' tensors are, unless told otherwise.
inline at::Device OnCpu(int /*rank*/) { return at::kCPU; }

// NCCL and CUDA of `size` ranks that are threads of this process, on host memory:
//
//   FakeFabric fabric(2);
//   auto comm = nccl::CreateOn(fabric.library(rank), *store, rank, 2);  // on a thread each
//
// Tensors are on device_of(rank): the CPU, or what only calls itself another device
// (comm/testing/host_device.h).
//
// Streams are queues, each with a thread that works it off, so that what is launched runs later and
// beside the caller. The host is the current stream of who has not asked for another one: there
// tensors are computed by the thread itself, and WaitEvent blocks it, so that code for the CPU runs
// unchanged on this communicator. QueuedStream gives a stream as a GPU has it.
//
// Communicators behave like NCCL's made with blocking = 0: calls return kInProgress, an operation
// ends when all ranks have started the same, and not at all where one never does. The first ones of
// a communicator stay in progress until the ranks they go to have launched theirs, since NCCL
// connects them then; and what frees a communicator waits for what the rank's others have on the
// device, as freeing its memory does. What no correct caller does (calls on a communicator that is
// freed, destruction before it is flushed) is counted.
class FakeFabric {
 public:
  explicit FakeFabric(int size, std::function<at::Device(int rank)> device_of = OnCpu);
  ~FakeFabric();  // waits for the streams' threads

  std::shared_ptr<Library> library(int rank);

  void Inject(const Fault& fault);

  // Gives `rank` the device of another: two ranks on one GPU.
  void ShareDevice(int rank, int with);

  LiveCounts live() const;
  int misuses() const;
  int calls(int rank, Where where) const;

 private:
  friend class QueuedStream;
  const std::shared_ptr<FakeState> impl_;
};

// While it lives, the current stream of this thread is a queue, as on a GPU: nothing waits on the
// host.
class QueuedStream {
 public:
  QueuedStream(FakeFabric& fabric, int rank);
  ~QueuedStream();

  // Queues a kernel.
  void Run(std::function<void()> kernel);

  // Waits until all kernels have run.
  void Synchronize();

 private:
  const std::shared_ptr<Library> library_;
  const std::shared_ptr<FakeState> impl_;
  const Stream stream_;
  const Stream previous_;
};

}  // namespace lockstep::comm::nccl::testing
