#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lockstep::parallel::fsdp {

// Storage whose memory comes and goes, while tensors and what autograd has saved of them keep it:
// sealed, it has none, and whoever asks for it gets a c10::Error that says `message`, on any device
// and in any kernel. A null pointer alone would crash most kernels.
class SealedStorage {
 public:
  // For `bytes` on `device`; sealed.
  SealedStorage(int64_t bytes, at::Device device);

  void SetMessage(const std::string& message);

  // A contiguous tensor of it.
  at::Tensor Tensor(at::IntArrayRef sizes, at::ScalarType dtype) const;

  // Points it at memory that somebody else owns.
  void Open(void* data);

  void Seal();

 private:
  at::Storage storage_;
};

}  // namespace lockstep::parallel::fsdp
