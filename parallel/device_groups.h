#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::parallel {

// The tensors as LibTorch's _foreach operations are fast with: each group of one device and dtype.
// In their order within a group; empty tensors are left out.
std::vector<std::vector<at::Tensor>> GroupByDeviceAndDtype(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::parallel
