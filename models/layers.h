#pragma once

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/parallel/unit.h"

namespace lockstep::models {

// Layers of LibTorch that are Units by themselves: for models without blocks, whose single layers
// are what a strategy shards, gathers and frees.
using Linear = parallel::Unit<torch::nn::LinearImpl>;
using Conv2d = parallel::Unit<torch::nn::Conv2dImpl>;

}  // namespace lockstep::models
