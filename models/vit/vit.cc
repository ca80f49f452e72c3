#include "lockstep/models/vit/vit.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace lockstep::models {
namespace {

constexpr int64_t kPatch = 7;  // side of a patch
constexpr int64_t kGrid = 4;   // patches in a row of an image
constexpr int64_t kTokens = kGrid * kGrid;
constexpr int64_t kClasses = 10;

torch::nn::LayerNorm MakeNorm(int64_t dim) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim}));
}

}  // namespace

VitBlockImpl::VitBlockImpl(int64_t dim, int64_t heads)
    : heads_(heads),
      norm1_(MakeNorm(dim)),
      norm2_(MakeNorm(dim)),
      qkv_(dim, 3 * dim),
      proj_(dim, dim),
      fc1_(dim, 4 * dim),
      fc2_(4 * dim, dim) {
  TORCH_CHECK(heads > 0 && dim % heads == 0, "vit: ", heads, " heads do not divide dim ", dim);
  register_module("norm1", norm1_);
  register_module("norm2", norm2_);
  register_module("qkv", qkv_);
  register_module("proj", proj_);
  register_module("fc1", fc1_);
  register_module("fc2", fc2_);
}

at::Tensor VitBlockImpl::forward(at::Tensor x_BTC) {
  const int64_t batch = x_BTC.size(0), tokens = x_BTC.size(1), dim = x_BTC.size(2);
  const at::Tensor qkv_3BHTC =
      qkv_(norm1_(x_BTC)).view({batch, tokens, 3, heads_, dim / heads_}).permute({2, 0, 3, 1, 4});
  const at::Tensor mixed_BHTC = at::scaled_dot_product_attention(
      qkv_3BHTC.select(0, 0), qkv_3BHTC.select(0, 1), qkv_3BHTC.select(0, 2));
  x_BTC = x_BTC + proj_(mixed_BHTC.transpose(1, 2).reshape({batch, tokens, dim}));
  return x_BTC + fc2_(at::gelu(fc1_(norm2_(x_BTC))));
}

VitImpl::VitImpl(const VitOptions& options)
    : patch_(kPatch * kPatch, options.dim),
      pos_(register_parameter("pos", at::zeros({1, kTokens, options.dim}))),
      norm_(MakeNorm(options.dim)),
      head_(nullptr) {
  register_module("patch", patch_);
  register_module("blocks", blocks_);
  for (int64_t i = 0; i < options.depth; ++i) {
    blocks_->push_back(VitBlock(options.dim, options.heads));
  }
  register_module("norm", norm_);
  head_ = register_module("head", torch::nn::Linear(options.dim, kClasses));
}

at::Tensor VitImpl::forward(at::Tensor images) {
  const at::Tensor patches = images.view({-1, kGrid, kPatch, kGrid, kPatch})
                                 .permute({0, 1, 3, 2, 4})
                                 .reshape({-1, kTokens, kPatch * kPatch});
  at::Tensor x_BTC = patch_(patches) + pos_;
  for (const auto& block : *blocks_) x_BTC = block->as<VitBlock>()->forward(x_BTC);
  return head_(norm_(x_BTC).mean(1));
}

}  // namespace lockstep::models
