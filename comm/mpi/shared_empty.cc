#include "lockstep/comm/mpi/shared_empty.h"

#include <ATen/ops/from_blob.h>

#include "lockstep/tools/trace/memory.h"

namespace lockstep::comm::mpi {
namespace {

constexpr int64_t kMinBytes = 16 << 10;

}  // namespace

at::Tensor SharedEmpty(Arena& arena, at::IntArrayRef sizes, at::ScalarType dtype) {
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes < kMinBytes) return at::Tensor();
  void* block = arena.Allocate(bytes);
  if (block == nullptr) return at::Tensor();
  trace::AddBlock(block, bytes);
  const auto free = [&arena](void* data) {
    trace::RemoveBlock(data);
    arena.Free(data);
  };
  return at::from_blob(block, sizes, free, at::TensorOptions().dtype(dtype));
}

}  // namespace lockstep::comm::mpi
