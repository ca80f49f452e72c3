#include "lockstep/tutorials/09_fsdp_bench/gpu_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/version.h>

namespace lockstep::tutorials {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9

GpuMemory GpuPeak(c10::Device device) {
  if (!device.is_cuda()) return {};
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {stats.allocated_bytes[kAll].peak, stats.reserved_bytes[kAll].peak};
}

void ResetGpuPeak(c10::Device device) {
  if (device.is_cuda()) at::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

#else

GpuMemory GpuPeak(c10::Device /*device*/) { return {}; }
void ResetGpuPeak(c10::Device /*device*/) {}

#endif

}  // namespace lockstep::tutorials
