// Programs on a real GPU, as one rank, beside the same on the CPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

class GpuProgramsTest : public testing::Test {
 protected:
  void SetUp() override {
    const absl::Status usable = comm::nccl::CheckDevices();
    if (!usable.ok()) GTEST_SKIP() << "needs a GPU: " << usable;
  }
};

std::string OutputOf(std::vector<std::string> words) {
  const Outcome outcome = RunProgram(std::move(words));
  EXPECT_EQ(outcome.exit_status, 0) << outcome.out << outcome.err;
  return outcome.out;
}

TEST_F(GpuProgramsTest, TorchDistGpu) {
  const std::string out =
      OutputOf({"tutorials/01_torch_dist_gpu/torch_dist_gpu", "--device=cuda", "--ranks=1"});
  EXPECT_NE(out.find("rank 0 of 1 on cuda:0: ten times the sum is 10\n"), std::string::npos) << out;
}

struct Epoch {
  double loss = 0, test_loss = 0, accuracy = 0;
};

Epoch MnistDdp(const std::string& device) {
  const std::string out = OutputOf({"tutorials/05_mnist_ddp/mnist_ddp", "--device=" + device,
                                    "--ranks=1", "--model=mlp", "--epochs=1", "--steps=50"});
  Epoch epoch;
  EXPECT_EQ(std::sscanf(out.c_str(), "epoch %*d: loss %lf, test loss %lf, test accuracy %lf %%",
                        &epoch.loss, &epoch.test_loss, &epoch.accuracy),
            3)
      << out;
  return epoch;
}

TEST_F(GpuProgramsTest, MnistDdp) {
  const Epoch gpu = MnistDdp("cuda");
  const Epoch cpu = MnistDdp("cpu");
  EXPECT_NEAR(gpu.loss, cpu.loss, 0.01);
  EXPECT_NEAR(gpu.test_loss, cpu.test_loss, 0.01);
  EXPECT_NEAR(gpu.accuracy, cpu.accuracy, 1);
  EXPECT_GT(gpu.accuracy, 60);
}

// What fsdp_bench writes with --json.
nlohmann::json FsdpBench(const std::string& device) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/" + device + ".json";
  const std::string out =
      OutputOf({"tutorials/09_fsdp_bench/fsdp_bench", "--device=" + device, "--ranks=1",
                "--model=mlp", "--steps=5", "--strategies=none,ddp,fsdp", "--json=" + path});
  EXPECT_NE(out.find("Losses: at every step within a relative"), std::string::npos) << out;
  std::ifstream file(path);
  return nlohmann::json::parse(file, /*cb=*/nullptr, /*allow_exceptions=*/false);
}

TEST_F(GpuProgramsTest, FsdpBench) {
  const nlohmann::json gpu = FsdpBench("cuda");
  const nlohmann::json cpu = FsdpBench("cpu");
  ASSERT_TRUE(gpu.is_object() && cpu.is_object());
  EXPECT_LT(gpu["loss_difference"].get<double>(), 1e-3);
  for (int strategy = 0; strategy < 3; ++strategy) {
    const auto found = gpu["strategies"][strategy]["losses"].get<std::vector<double>>();
    const auto expected = cpu["strategies"][strategy]["losses"].get<std::vector<double>>();
    ASSERT_EQ(found.size(), expected.size());
    EXPECT_EQ(found.size(), 5);
    for (size_t step = 0; step < found.size(); ++step) {
      EXPECT_NEAR(found[step], expected[step], 1e-2) << "strategy " << strategy << " step " << step;
    }
  }
}

}  // namespace
}  // namespace lockstep::tutorials
