#include "lockstep/parallel/fsdp/buffer_pool.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace lockstep::parallel::fsdp {

at::Tensor BufferPool::Take(int64_t numel, at::ScalarType dtype) {
  // The smallest that is large enough.
  auto best = free_.end();
  for (auto buffer = free_.begin(); buffer != free_.end(); ++buffer) {
    const bool fits = buffer->scalar_type() == dtype && buffer->numel() >= numel;
    if (fits && (best == free_.end() || buffer->numel() < best->numel())) best = buffer;
  }
  if (best != free_.end()) {
    at::Tensor buffer = std::move(*best);
    free_.erase(best);
    return buffer.numel() == numel ? buffer : buffer.narrow(0, 0, numel);
  }
  // What is free is too small: free it first, so that the pool does not grow by it.
  if (!free_.empty()) free_.pop_back();
  trace::MemoryScope scope(category_);
  return comm_.Empty({numel}, dtype);
}

void BufferPool::Give(at::Tensor buffer) {
  const auto whole = static_cast<int64_t>(buffer.storage().nbytes() / buffer.element_size());
  if (buffer.numel() != whole) buffer = buffer.as_strided({whole}, {1}, 0);
  if (poison_ && buffer.is_floating_point()) buffer.fill_(std::numeric_limits<double>::quiet_NaN());
  free_.push_back(std::move(buffer));
}

}  // namespace lockstep::parallel::fsdp
