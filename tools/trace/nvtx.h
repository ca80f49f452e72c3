#pragma once

#include "absl/status/status.h"

namespace lockstep::trace {

// From now on each Span (recorder.h) is an NVTX range, too, which Nsight Systems draws above the
// kernels that were launched in it:
//
//   nsys profile -t cuda,nvtx bazel-bin/tutorials/09_fsdp_bench/fsdp_bench --nvtx
//
// Independent of StartRecording(). FailedPrecondition where LibTorch has no CUDA.
absl::Status StartNvtx();

}  // namespace lockstep::trace
