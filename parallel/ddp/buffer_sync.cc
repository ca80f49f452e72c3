#include "lockstep/parallel/ddp/buffer_sync.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::ddp {
namespace {

constexpr int64_t kAlignment = 16;  // bytes; of any dtype

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

BufferSync::BufferSync(std::vector<at::Tensor> buffers, comm::Communicator& comm)
    : buffers_(std::move(buffers)), comm_(comm) {
  if (buffers_.empty()) return;
  int64_t bytes = 0;
  for (const at::Tensor& buffer : buffers_) bytes += Aligned(buffer.nbytes());
  bytes_ = comm_.Empty({bytes}, at::kByte);
  int64_t offset = 0;
  for (const at::Tensor& buffer : buffers_) {
    const int64_t size = static_cast<int64_t>(buffer.nbytes());
    copies_.push_back(
        bytes_.narrow(0, offset, size).view(buffer.scalar_type()).view(buffer.sizes()));
    offset += Aligned(size);
  }
}

void BufferSync::Start(int root) {
  if (buffers_.empty()) return;
  root_ = root;
  if (comm_.rank() == root_) {
    for (size_t i = 0; i < buffers_.size(); ++i) copies_[i].copy_(buffers_[i]);
  }
  work_ = comm_.Broadcast(bytes_, root_);
}

void BufferSync::Finish() {
  if (buffers_.empty()) return;
  ThrowIfError(work_.Wait());
  if (comm_.rank() == root_) return;
  // Behind autograd's back: another forward's graph may still hold these buffers, which it does not
  // read in training.
  at::AutoDispatchBelowADInplaceOrView no_version;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    at::Tensor buffer = buffers_[i];
    buffer.copy_(copies_[i]);
  }
}

}  // namespace lockstep::parallel::ddp
