#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>

#include "lockstep/parallel/unit.h"

namespace lockstep::models {

struct VitOptions {
  int64_t dim = 256;  // Size of a token, a multiple of heads. Default: 256.
  int64_t depth = 6;  // Blocks. Default: 6.
  int64_t heads = 8;  // Attention heads of a block. Default: 8.
};

// Transformer block with the norms first (as in GPT-2): attention, then an MLP four times as wide,
// each added to its input. Tokens (B, T, dim) -> (B, T, dim).
class VitBlockImpl : public torch::nn::Module {
 public:
  VitBlockImpl(int64_t dim, int64_t heads);

  at::Tensor forward(at::Tensor x_BTC);

 private:
  const int64_t heads_;
  torch::nn::LayerNorm norm1_;
  torch::nn::LayerNorm norm2_;
  torch::nn::Linear qkv_;
  torch::nn::Linear proj_;
  torch::nn::Linear fc1_;
  torch::nn::Linear fc2_;
};
using VitBlock = parallel::Unit<VitBlockImpl>;

// Vision transformer for MNIST (Dosovitskiy et al. 2020, with mean pooling and no class token): an
// image is cut into 16 patches of 7 x 7, each becomes a token, and a position is added.
//
//   models::Vit model(models::VitOptions{.dim = 512, .depth = 8});
//   at::Tensor logits = model(images);  // (B, 1, 28, 28) -> (B, 10)
//
// State dict: pos, patch, blocks.0.norm1, .norm2, .qkv, .proj, .fc1, .fc2, ..., norm, head. Each
// block is a Unit. Throws c10::Error where heads do not divide dim.
class VitImpl : public torch::nn::Module {
 public:
  explicit VitImpl(const VitOptions& options = {});

  at::Tensor forward(at::Tensor images);

 private:
  torch::nn::Linear patch_;
  at::Tensor pos_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
};
using Vit = parallel::Unit<VitImpl>;

}  // namespace lockstep::models
