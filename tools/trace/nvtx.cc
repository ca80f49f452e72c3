#include "lockstep/tools/trace/nvtx.h"

#include <torch/csrc/profiler/stubs/base.h>

#include "lockstep/tools/trace/recorder.h"

namespace lockstep::trace {

absl::Status StartNvtx() {
  // LibTorch's CUDA part registers these, so nothing of CUDA is linked or included here.
  if (!torch::profiler::impl::cudaStubs()->enabled()) {
    return absl::FailedPreconditionError(
        "NVTX ranges need CUDA, and this LibTorch has none: build with --config=gpu");
  }
  using torch::profiler::impl::cudaStubs;
  StartAnnotating({.push = [](const char* name) { cudaStubs()->rangePush(name); },
                   .pop = [] { cudaStubs()->rangePop(); }});
  return absl::OkStatus();
}

}  // namespace lockstep::trace
