#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <utility>
#include <vector>

namespace lockstep::parallel {

// Runs code a second time under the conditions of the first: what recomputation needs of LibTorch's
// state beside the graph.
//
//   Replay replay(devices, [&] { y = forward(x); });   // without gradients
//   ...
//   y = replay.Run([&] { return forward(x); });        // the same y, now with gradients
//
// Keeps the states of the default random generators of the CPU and of `devices`, where the first
// run drew from them, and the autocast state of those devices.
class Replay {
 public:
  Replay(const std::vector<at::Device>& devices, const std::function<void()>& first);

  // Afterwards generators and autocast are as they were before, also when `again` throws.
  std::vector<at::Tensor> Run(const std::function<std::vector<at::Tensor>()>& again) const;

  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  using RandomState = std::pair<at::Generator, at::Tensor>;

 private:
  std::vector<Autocast> autocast_;
  std::vector<RandomState> random_;
};

// While it lives, the module's buffers are copies of themselves: what is written to them is
// forgotten.
class ScratchBuffers {
 public:
  explicit ScratchBuffers(const torch::nn::Module& module);
  ~ScratchBuffers();
  ScratchBuffers(const ScratchBuffers&) = delete;
  ScratchBuffers& operator=(const ScratchBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;  // and their own data
};

}  // namespace lockstep::parallel
