#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace lockstep::tutorials {

// What LibTorch's allocator for a GPU counts. It keeps what was freed for the next tensors, so that
// other programs see `reserved` in use.
struct GpuMemory {
  int64_t allocated = 0;  // bytes in tensors, the most at once
  int64_t reserved = 0;   // bytes taken from the GPU, the most at once
};

// Since ResetGpuPeak(). Zeros for the CPU, and for LibTorch before 2.9, which cannot be asked.
GpuMemory GpuPeak(c10::Device device);
void ResetGpuPeak(c10::Device device);

}  // namespace lockstep::tutorials
