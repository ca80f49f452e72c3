#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep::comm::nccl {

// What the functions below hand out and take; only the one who fills the table looks inside. A null
// Stream is a stream like any other: CUDA's default one.
struct OpaqueStream;
struct OpaqueEvent;
struct OpaqueComm;
using Stream = OpaqueStream*;
using Event = OpaqueEvent*;
using Comm = OpaqueComm*;

using UniqueId = std::array<char, 128>;

// The values are NCCL's.
enum class Result {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

// A reduction: one of these (NCCL's values), or what CreatePreMulSum gave.
using Reduction = int;
constexpr Reduction kSum = 0;
constexpr Reduction kProduct = 1;
constexpr Reduction kMax = 2;
constexpr Reduction kMin = 3;
constexpr Reduction kAverage = 4;

// Every function of NCCL and CUDA that this backend calls, for one rank and its device: one table,
// so that tests can stand in for the libraries (see testing/fake_library.h). cuda_library.h fills
// it with the real ones, and is the only code here that sees their headers.
//
// Functions of NCCL keep its meaning: communicators are made with blocking = 0, so each call may
// return kInProgress, and is over when GetAsyncError says something else. Those of CUDA return a
// Status with CUDA's text. All may be called from any thread and choose the device themselves.
class Library {
 public:
  virtual ~Library() = default;
  Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Where tensors are.
  virtual at::Device device() const = 0;

  // CUDA's name of the device, the same in every process: "GPU-8f3a...".
  virtual absl::StatusOr<std::string> DeviceUuid() = 0;

  // A stream of the highest priority that does not wait for the default one.
  virtual absl::StatusOr<Stream> CreateStream() = 0;
  virtual void DestroyStream(Stream stream) = 0;  // what is queued goes on
  virtual Stream CurrentStream() = 0;             // on which this thread's kernels run

  // Waits see the last RecordEvent before them; an event may be recorded again and again.
  virtual absl::StatusOr<Event> CreateEvent() = 0;
  virtual void DestroyEvent(Event event) = 0;
  virtual absl::Status RecordEvent(Event event, Stream stream) = 0;
  virtual absl::Status WaitEvent(Stream stream, Event event) = 0;
  virtual absl::StatusOr<bool> QueryEvent(Event event) = 0;  // whether it is done

  virtual absl::Status Copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual absl::Status Scale(const at::Tensor& tensor, double factor, Stream stream) = 0;

  virtual const char* ErrorString(Result result) = 0;
  virtual std::string LastError(Comm comm) = 0;  // "" for none

  virtual Result GetUniqueId(UniqueId* id) = 0;
  virtual Result CommInitRank(Comm* comm, int size, const UniqueId& id, int rank) = 0;
  // A color of -1: no new communicator.
  virtual Result CommSplit(Comm comm, int color, int key, Comm* part) = 0;
  virtual Result CommFinalize(Comm comm) = 0;
  virtual Result CommDestroy(Comm comm) = 0;
  virtual Result CommAbort(Comm comm) = 0;
  virtual Result GetAsyncError(Comm comm, Result* error) = 0;

  virtual Result GroupStart() = 0;
  virtual Result GroupEnd() = 0;
  virtual Result AllReduce(const void* input, void* output, size_t count, at::ScalarType dtype,
                           Reduction reduction, Comm comm, Stream stream) = 0;
  virtual Result AllGather(const void* input, void* output, size_t count, at::ScalarType dtype,
                           Comm comm, Stream stream) = 0;
  virtual Result ReduceScatter(const void* input, void* output, size_t count, at::ScalarType dtype,
                               Reduction reduction, Comm comm, Stream stream) = 0;
  virtual Result Broadcast(const void* input, void* output, size_t count, at::ScalarType dtype,
                           int root, Comm comm, Stream stream) = 0;
  virtual Result Send(const void* input, size_t count, at::ScalarType dtype, int peer, Comm comm,
                      Stream stream) = 0;
  virtual Result Recv(void* output, size_t count, at::ScalarType dtype, int peer, Comm comm,
                      Stream stream) = 0;

  // A sum whose inputs are multiplied by `factor` on the way.
  virtual Result CreatePreMulSum(Reduction* reduction, double factor, at::ScalarType dtype,
                                 Comm comm) = 0;
  virtual Result DestroyReduction(Reduction reduction, Comm comm) = 0;
};

}  // namespace lockstep::comm::nccl
