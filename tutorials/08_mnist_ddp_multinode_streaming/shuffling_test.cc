// Whether training notices that rows are shuffled by chunks, in windows, and not all together.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/chunk_shuffle_sampler.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/sampler.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

constexpr int kEpochs = 3;
constexpr int64_t kBatch = 100;
constexpr int64_t kStepsOfPoint = 100;  // over which a point of the curve is averaged

std::shared_ptr<data::hdf5::Hdf5Dataset> FashionMnist(bool test) {
  const std::string path = testing::TempDir() + (test ? "/test.h5" : "/train.h5");
  std::vector<std::string> words = {"tutorials/08_mnist_ddp_multinode_streaming/create_mnist_h5",
                                    "--output=" + path, "--chunk_rows=128", "--gzip=1"};
  if (test) words.push_back("--test_split");
  const Outcome outcome = RunProgram(words);
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  return ValueOrThrow(data::hdf5::Open(
      {.files = {path},
       .fields = {{.dataset = "images", .dtype = at::kFloat, .divide_by = 255, .shape = {784}},
                  {.dataset = "labels", .classes = 10}}}));
}

struct Net {
  torch::nn::Linear first{784, 128};
  torch::nn::Linear second{128, 10};
  at::Tensor operator()(const at::Tensor& images) { return second(first(images).relu()); }
  std::vector<at::Tensor> parameters() {
    return {first->weight, first->bias, second->weight, second->bias};
  }
};

struct Curve {
  std::vector<double> losses;  // means over kStepsOfPoint steps
  double accuracy = 0;         // on the test images, in %
};

Curve Train(const std::shared_ptr<data::Dataset>& images,
            const std::shared_ptr<data::Dataset>& test_images,
            std::shared_ptr<const data::Sampler> sampler) {
  torch::manual_seed(1);
  Net net;
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-3));
  Curve curve;
  data::Loader loader(images, std::move(sampler), {.batch_size = kBatch});
  double sum = 0;
  int64_t steps = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const data::Batch& batch : loader) {
      optimizer.zero_grad();
      const at::Tensor loss = at::cross_entropy_loss(net(batch["images"]), batch["labels"]);
      loss.backward();
      optimizer.step();
      sum += loss.item<double>();
      if (++steps % kStepsOfPoint == 0) {
        curve.losses.push_back(sum / kStepsOfPoint);
        sum = 0;
      }
    }
  }
  const at::NoGradGuard no_grad;
  data::Loader test_loader(test_images, data::SequentialSampler(test_images->size()),
                           {.batch_size = kBatch});
  double right = 0;
  for (const data::Batch& batch : test_loader) {
    right += net(batch["images"]).argmax(/*dim=*/1).eq(batch["labels"]).sum().item<double>();
  }
  curve.accuracy = 100 * right / static_cast<double>(test_images->size());
  return curve;
}

TEST(Shuffling, TrainingOnFashionMnistDoesNotNoticeWindows) {
  const auto train = FashionMnist(/*test=*/false);
  const auto test = FashionMnist(/*test=*/true);
  const Curve full = Train(train, test,
                           std::make_shared<data::DistributedSampler>(
                               data::DistributedSamplerOptions{.size = train->size(), .seed = 1}));
  const Curve windows = Train(train, test,
                              std::make_shared<data::ChunkShuffleSampler>(data::ChunkShuffleOptions{
                                  .chunks = train->chunks(), .window_chunks = 16, .seed = 1}));
  ASSERT_EQ(full.losses.size(), kEpochs * 60'000 / kBatch / kStepsOfPoint);
  ASSERT_EQ(windows.losses.size(), full.losses.size());
  for (size_t i = 0; i < full.losses.size(); ++i) {
    EXPECT_NEAR(windows.losses[i], full.losses[i], 0.1 * full.losses[i]) << i;
    std::printf("steps %5zu: loss %.4f by chunks, %.4f in any order\n", (i + 1) * kStepsOfPoint,
                windows.losses[i], full.losses[i]);
  }
  EXPECT_GT(full.accuracy, 84);
  EXPECT_NEAR(windows.accuracy, full.accuracy, 2);
  std::printf("test accuracy %.2f %% by chunks, %.2f %% in any order\n", windows.accuracy,
              full.accuracy);
}

}  // namespace
}  // namespace lockstep::tutorials
