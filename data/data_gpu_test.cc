// Batches in page-locked memory, copied to a real GPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/data/batch.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/synthetic/synthetic.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

constexpr int64_t kFloats = 1 << 20;
const at::Device kGpu(at::kCUDA, 0);

c10::impl::VirtualGuardImpl Gpu() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

c10::Event MarkCurrentStream() {
  c10::Event event(at::kCUDA);
  event.record(Gpu().getStream(kGpu));
  return event;
}

class DataGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const absl::Status usable = comm::nccl::CheckDevices();
    if (!usable.ok()) GTEST_SKIP() << "needs a GPU: " << usable;
    matrix_ = at::full({4096, 4096}, 1e-4, at::TensorOptions(kGpu));
    product_ = at::mm(matrix_, matrix_);  // cuBLAS starts
    Gpu().synchronizeDevice(kGpu.index());
  }

  // Some 0.1 s of kernels at least, in the current stream: its later work stays behind them.
  void KeepBusy() {
    at::empty({kFloats},
              at::TensorOptions(kGpu));  // is there for a copy, which else may wait for it
    for (int i = 0; i < 100; ++i) at::mm_out(product_, matrix_, matrix_);
  }

  at::Tensor matrix_, product_;
};

TEST_F(DataGpuTest, TheHostGoesOnWhileACopyIsDue) {
  Batch batch(/*pinned=*/true);
  const at::Tensor x = batch.Reserve("x", {kFloats}, at::kFloat).fill_(1);
  EXPECT_TRUE(x.is_pinned());
  KeepBusy();
  const at::Tensor copy = batch.To("x", kGpu);
  const c10::Event copied = MarkCurrentStream();
  EXPECT_FALSE(copied.query()) << "the host has waited";
  x.fill_(2);  // What nobody must do, and Reserve does not: the copy is still to come.
  EXPECT_EQ(copy.sum().item<double>(), 2.0 * kFloats);
}

TEST_F(DataGpuTest, ReserveWaitsForTheCopy) {
  Batch batch(/*pinned=*/true);
  batch.Reserve("x", {kFloats}, at::kFloat).fill_(1);
  const void* memory = batch["x"].const_data_ptr();
  KeepBusy();
  const at::Tensor copy = batch.To("x", kGpu);
  batch.Reserve("x", {kFloats}, at::kFloat).fill_(2);
  EXPECT_EQ(batch["x"].const_data_ptr(), memory);
  EXPECT_EQ(copy.sum().item<double>(), 1.0 * kFloats);
}

TEST_F(DataGpuTest, ReserveWaitsForTheCopiesOnAllStreams) {
  Batch batch(/*pinned=*/true);
  batch.Reserve("x", {kFloats}, at::kFloat).fill_(1);
  at::Tensor slow;
  const c10::Stream side = Gpu().getStreamFromGlobalPool(kGpu);
  {
    const c10::StreamGuard guard(side);
    KeepBusy();
    slow = batch.To("x", kGpu);
  }
  const at::Tensor fast = batch.To("x", kGpu);
  batch.Reserve("x", {kFloats}, at::kFloat).fill_(2);
  EXPECT_EQ(fast.sum().item<double>(), 1.0 * kFloats);
  Gpu().synchronizeDevice(kGpu.index());
  EXPECT_EQ(slow.sum().item<double>(), 1.0 * kFloats);
}

TEST_F(DataGpuTest, CopiesOnTheCurrentStream) {
  Batch batch(/*pinned=*/true);
  batch.Reserve("x", {kFloats}, at::kFloat).fill_(1);
  const c10::Stream side = Gpu().getStreamFromGlobalPool(kGpu);
  const c10::StreamGuard guard(side);
  KeepBusy();
  batch.To("x", kGpu);
  EXPECT_FALSE(side.query());
  EXPECT_TRUE(Gpu().queryStream(c10::Stream(c10::Stream::DEFAULT, kGpu)));
}

TEST_F(DataGpuTest, APinnedLoaderGivesWhatAPlainOneDoes) {
  const auto rows = [](bool pin_memory) {
    std::shared_ptr<Dataset> dataset = ValueOrThrow(synthetic::Create({.size = 1003}));
    return std::make_unique<Loader>(std::move(dataset), DistributedSampler({.size = 1003}),
                                    LoaderOptions{.batch_size = 50, .pin_memory = pin_memory});
  };
  const auto pinned = rows(true);
  std::vector<at::Tensor> images, labels;
  for (const Batch& batch : *pinned) {
    EXPECT_TRUE(batch["images"].is_pinned());
    if (images.size() % 4 == 0) KeepBusy();  // so that copies fall behind the loader
    images.push_back(batch.To("images", kGpu));
    labels.push_back(batch.To("labels", kGpu));
  }
  const auto plain = rows(false);
  size_t i = 0;
  for (const Batch& batch : *plain) {
    ASSERT_LT(i, images.size());
    EXPECT_TRUE(images[i].cpu().equal(batch["images"])) << "batch " << i;
    EXPECT_TRUE(labels[i].cpu().equal(batch["labels"])) << "batch " << i;
    ++i;
  }
  EXPECT_EQ(i, images.size());
}

}  // namespace
}  // namespace lockstep::data
