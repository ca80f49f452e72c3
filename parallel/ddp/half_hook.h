#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/parallel/ddp/comm_hook.h"

namespace lockstep::parallel::ddp {

// Sends gradients in 16 bits, at half the bytes of f32, for networks that are slower than the cast:
//
//   parallel::Ddp ddp(model, comm, {.comm_hook = std::make_shared<HalfHook>(at::kBFloat16)});
//
// Communicators average without overflow where the average itself does not. f16 keeps 11 bits of
// each gradient and loses those below 6e-8, bf16 keeps 8 at the range of f32. Each bucket has a
// second buffer, of 16 bits. Buckets that have 16 bits already are sent as they are.
class HalfHook : public CommHook {
 public:
  // at::kHalf or at::kBFloat16. StatusError for any other.
  explicit HalfHook(at::ScalarType dtype);

  std::string name() const override;
  void SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) override;
  void Start(size_t bucket) override;
  void Finish() override;

 private:
  const at::ScalarType dtype_;
  absl::Span<const Bucket> buckets_;
  comm::Communicator* comm_ = nullptr;
  std::vector<at::Tensor> sent_;  // by bucket: its flat() where that has 16 bits
  std::vector<comm::Work> works_;
};

}  // namespace lockstep::parallel::ddp
