#include "lockstep/tools/trace/nvtx.h"

#include <gtest/gtest.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <string>
#include <vector>

#include "lockstep/tools/trace/recorder.h"

namespace lockstep::trace {
namespace {

std::vector<std::string> calls;

// In the place of what LibTorch's CUDA part registers.
class FakeCuda : public torch::profiler::impl::ProfilerStubs {
 public:
  void record(c10::DeviceIndex* /*device*/, torch::profiler::impl::ProfilerVoidEventStub* /*event*/,
              int64_t* /*cpu_ns*/) const override {}
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub* /*event*/,
                const torch::profiler::impl::ProfilerVoidEventStub* /*event2*/) const override {
    return 0;
  }
  void mark(const char* /*name*/) const override {}
  void rangePush(const char* name) const override { calls.emplace_back(name); }
  void rangePop() const override { calls.emplace_back("pop"); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> /*op*/) const override {}
  void synchronize() const override {}
};

TEST(NvtxTest, SpansAreRangesWhereThereIsCuda) {
  EXPECT_EQ(StartNvtx().code(), absl::StatusCode::kFailedPrecondition);
  { const Span before("before"); }
  EXPECT_TRUE(calls.empty());

  const int64_t recorded = CountRecordedEvents().recorded;
  static FakeCuda cuda;
  torch::profiler::impl::registerCUDAMethods(&cuda);
  ASSERT_TRUE(StartNvtx().ok());
  ASSERT_TRUE(StartNvtx().ok());  // again
  {
    const Span outer("forward", "train");
    const Span inner(std::string_view("layer1").substr(0, 5));
  }
  EXPECT_EQ(calls, (std::vector<std::string>{"forward", "layer", "pop", "pop"}));
  EXPECT_EQ(CountRecordedEvents().recorded, recorded);
}

}  // namespace
}  // namespace lockstep::trace
