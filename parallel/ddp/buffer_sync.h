#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/communicator.h"

namespace lockstep::parallel::ddp {

// Copies one rank's buffers (the running statistics of BatchNorm, ...) to all, in one message
// whatever their dtypes and strides.
class BufferSync {
 public:
  BufferSync(std::vector<at::Tensor> buffers, comm::Communicator& comm);

  // Reads the buffers.
  void Start(int root);

  // Waits, and writes them. StatusError.
  void Finish();

 private:
  const std::vector<at::Tensor> buffers_;
  comm::Communicator& comm_;
  at::Tensor bytes_;
  std::vector<at::Tensor> copies_;  // views of bytes_
  int root_ = 0;
  comm::Work work_;
};

}  // namespace lockstep::parallel::ddp
