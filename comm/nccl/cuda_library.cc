#include "lockstep/comm/nccl/cuda_library.h"

#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace lockstep::comm::nccl {
namespace {

static_assert(static_cast<int>(Result::kRemoteError) == ncclRemoteError);
static_assert(static_cast<int>(Result::kInProgress) == ncclInProgress);
static_assert(static_cast<int>(Result::kSystemError) == ncclSystemError);
static_assert(kSum == ncclSum && kProduct == ncclProd && kMax == ncclMax && kMin == ncclMin &&
              kAverage == ncclAvg);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

absl::Status CudaStatus(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("CUDA: ", what, ": ", cudaGetErrorString(error)));
}

Result ResultOf(ncclResult_t result) { return static_cast<Result>(result); }

ncclDataType_t TypeOf(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    default:
      return ncclUint8;
  }
}

cudaStream_t Of(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Of(Event event) { return reinterpret_cast<cudaEvent_t>(event); }
ncclComm_t Of(Comm comm) { return reinterpret_cast<ncclComm_t>(comm); }
ncclRedOp_t Of(Reduction reduction) { return static_cast<ncclRedOp_t>(reduction); }

ncclConfig_t NonBlocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

class RealLibrary : public Library {
 public:
  explicit RealLibrary(int index) : index_(static_cast<c10::DeviceIndex>(index)) {}

  at::Device device() const override { return at::Device(at::kCUDA, index_); }

  absl::StatusOr<std::string> DeviceUuid() override {
    cudaDeviceProp properties{};
    absl::Status status =
        CudaStatus("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, index_));
    if (!status.ok()) return status;
    std::string text = "GPU-";
    for (const char byte : properties.uuid.bytes) {
      absl::StrAppend(&text, absl::Hex(static_cast<unsigned char>(byte), absl::kZeroPad2));
    }
    return text;
  }

  absl::StatusOr<Stream> CreateStream() override {
    const c10::cuda::CUDAGuard guard(index_);
    int least = 0;
    int greatest = 0;
    absl::Status status = CudaStatus("cudaDeviceGetStreamPriorityRange",
                                     cudaDeviceGetStreamPriorityRange(&least, &greatest));
    if (!status.ok()) return status;
    cudaStream_t stream = nullptr;
    status = CudaStatus("cudaStreamCreateWithPriority",
                        cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    if (!status.ok()) return status;
    return reinterpret_cast<Stream>(stream);
  }

  void DestroyStream(Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    cudaStreamDestroy(Of(stream));
  }

  Stream CurrentStream() override {
    return reinterpret_cast<Stream>(c10::cuda::getCurrentCUDAStream(index_).stream());
  }

  absl::StatusOr<Event> CreateEvent() override {
    const c10::cuda::CUDAGuard guard(index_);
    cudaEvent_t event = nullptr;
    absl::Status status = CudaStatus("cudaEventCreateWithFlags",
                                     cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    if (!status.ok()) return status;
    return reinterpret_cast<Event>(event);
  }

  void DestroyEvent(Event event) override {
    const c10::cuda::CUDAGuard guard(index_);
    cudaEventDestroy(Of(event));
  }

  absl::Status RecordEvent(Event event, Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return CudaStatus("cudaEventRecord", cudaEventRecord(Of(event), Of(stream)));
  }

  absl::Status WaitEvent(Stream stream, Event event) override {
    const c10::cuda::CUDAGuard guard(index_);
    return CudaStatus("cudaStreamWaitEvent",
                      cudaStreamWaitEvent(Of(stream), Of(event), /*flags=*/0));
  }

  absl::StatusOr<bool> QueryEvent(Event event) override {
    const c10::cuda::CUDAGuard guard(index_);
    const cudaError_t error = cudaEventQuery(Of(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // it is no error, but would be taken for the next call's
      return false;
    }
    if (error == cudaSuccess) return true;
    return CudaStatus("a kernel or copy failed, as cudaEventQuery says", error);
  }

  absl::Status Copy(void* to, const void* from, size_t bytes, Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return CudaStatus("cudaMemcpyAsync",
                      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Of(stream)));
  }

  absl::Status Scale(const at::Tensor& tensor, double factor, Stream stream) override {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(Of(stream), index_));
    tensor.data().mul_(factor);
    return absl::OkStatus();
  }

  const char* ErrorString(Result result) override {
    return ncclGetErrorString(static_cast<ncclResult_t>(result));
  }

  std::string LastError(Comm comm) override {
    const char* text = ncclGetLastError(Of(comm));
    return text == nullptr ? "" : text;
  }

  Result GetUniqueId(UniqueId* id) override {
    ncclUniqueId made;
    const ncclResult_t result = ncclGetUniqueId(&made);
    std::copy(std::begin(made.internal), std::end(made.internal), id->begin());
    return ResultOf(result);
  }

  Result CommInitRank(Comm* comm, int size, const UniqueId& id, int rank) override {
    const c10::cuda::CUDAGuard guard(index_);
    ncclUniqueId given;
    std::copy(id.begin(), id.end(), std::begin(given.internal));
    ncclConfig_t config = NonBlocking();
    return ResultOf(
        ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(comm), size, given, rank, &config));
  }

  Result CommSplit(Comm comm, int color, int key, Comm* part) override {
    const c10::cuda::CUDAGuard guard(index_);
    ncclConfig_t config = NonBlocking();
    return ResultOf(ncclCommSplit(Of(comm), color < 0 ? NCCL_SPLIT_NOCOLOR : color, key,
                                  reinterpret_cast<ncclComm_t*>(part), &config));
  }

  Result CommFinalize(Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclCommFinalize(Of(comm)));
  }

  Result CommDestroy(Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclCommDestroy(Of(comm)));
  }

  Result CommAbort(Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclCommAbort(Of(comm)));
  }

  Result GetAsyncError(Comm comm, Result* error) override {
    ncclResult_t found = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(Of(comm), &found);
    *error = ResultOf(found);
    return ResultOf(result);
  }

  Result GroupStart() override { return ResultOf(ncclGroupStart()); }

  Result GroupEnd() override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclGroupEnd());
  }

  Result AllReduce(const void* input, void* output, size_t count, at::ScalarType dtype,
                   Reduction reduction, Comm comm, Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(
        ncclAllReduce(input, output, count, TypeOf(dtype), Of(reduction), Of(comm), Of(stream)));
  }

  Result AllGather(const void* input, void* output, size_t count, at::ScalarType dtype, Comm comm,
                   Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclAllGather(input, output, count, TypeOf(dtype), Of(comm), Of(stream)));
  }

  Result ReduceScatter(const void* input, void* output, size_t count, at::ScalarType dtype,
                       Reduction reduction, Comm comm, Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclReduceScatter(input, output, count, TypeOf(dtype), Of(reduction), Of(comm),
                                      Of(stream)));
  }

  Result Broadcast(const void* input, void* output, size_t count, at::ScalarType dtype, int root,
                   Comm comm, Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclBroadcast(input, output, count, TypeOf(dtype), root, Of(comm), Of(stream)));
  }

  Result Send(const void* input, size_t count, at::ScalarType dtype, int peer, Comm comm,
              Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclSend(input, count, TypeOf(dtype), peer, Of(comm), Of(stream)));
  }

  Result Recv(void* output, size_t count, at::ScalarType dtype, int peer, Comm comm,
              Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ResultOf(ncclRecv(output, count, TypeOf(dtype), peer, Of(comm), Of(stream)));
  }

  Result CreatePreMulSum(Reduction* reduction, double factor, at::ScalarType dtype,
                         Comm comm) override {
    // NCCL reads the factor in the data's own type.
    double f64 = factor;
    float f32 = static_cast<float>(factor);
    c10::Half f16(f32);
    c10::BFloat16 bf16(f32);
    void* scalar = dtype == at::kDouble  ? static_cast<void*>(&f64)
                   : dtype == at::kFloat ? static_cast<void*>(&f32)
                   : dtype == at::kHalf  ? static_cast<void*>(&f16)
                                         : static_cast<void*>(&bf16);
    ncclRedOp_t made = ncclSum;
    const ncclResult_t result =
        ncclRedOpCreatePreMulSum(&made, scalar, TypeOf(dtype), ncclScalarHostImmediate, Of(comm));
    *reduction = static_cast<Reduction>(made);
    return ResultOf(result);
  }

  Result DestroyReduction(Reduction reduction, Comm comm) override {
    return ResultOf(ncclRedOpDestroy(Of(reduction), Of(comm)));
  }

 private:
  const c10::DeviceIndex index_;
};

}  // namespace

absl::StatusOr<int> CountCudaDevices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) return 0;
  if (error != cudaSuccess) {
    return absl::UnavailableError(absl::StrCat("CUDA: ", cudaGetErrorString(error)));
  }
  return count;
}

std::shared_ptr<Library> CudaLibrary(int index) { return std::make_shared<RealLibrary>(index); }

}  // namespace lockstep::comm::nccl
