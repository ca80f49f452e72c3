#pragma once

#include <ATen/core/TensorBase.h>

#include <type_traits>
#include <utility>

namespace torch::autograd {
struct Node;
}

namespace lockstep::parallel {

// What LibTorch owns a node of autograd's graph by: std::shared_ptr<torch::autograd::Node>, or
// c10::intrusive_ptr in newer versions (2.15 has it, 2.11 not).
using NodePtr = std::decay_t<decltype(std::declval<const at::TensorBase&>().grad_fn())>;

// Gives a node, just made by new, to its first owner.
template <class NewNode, class Ptr = NodePtr>
Ptr OwnNode(NewNode* node) {
  if constexpr (requires { Ptr::unsafe_steal_from_new(node); }) {
    return Ptr::unsafe_steal_from_new(node);
  } else {
    return Ptr(node, [](auto* last) { deleteNode(last); });  // torch::autograd's
  }
}

}  // namespace lockstep::parallel
