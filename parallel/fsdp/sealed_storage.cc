#include "lockstep/parallel/fsdp/sealed_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

namespace lockstep::parallel::fsdp {
namespace {

// LibTorch can make a storage throw for good, not for a while: the flag has no setter that clears
// it. An explicit instantiation may name a private member, and so hands it out.
bool& Throws(c10::StorageImpl& storage);

template <bool c10::StorageImpl::*flag>
struct Access {
  friend bool& Throws(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct Access<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

SealedStorage::SealedStorage(int64_t bytes, at::Device device)
    : storage_(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
               at::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false) {
  Seal();
}

void SealedStorage::SetMessage(const std::string& message) {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  const bool throws = Throws(storage);
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);  // sets the flag, too
  Throws(storage) = throws;
}

at::Tensor SealedStorage::Tensor(at::IntArrayRef sizes, at::ScalarType dtype) const {
  // Not set_(), which looks at the data pointer.
  const at::Tensor like =
      at::empty({0}, at::TensorOptions().dtype(dtype).device(storage_.device()));
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(at::Storage(storage_), like.key_set(), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void SealedStorage::Open(void* data) {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  Throws(storage) = false;
  storage.set_data_ptr(at::DataPtr(data, storage.device()));  // and looks at the flag
}

void SealedStorage::Seal() {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  Throws(storage) = true;
  storage.set_data_ptr(at::DataPtr(nullptr, storage.device()));
}

}  // namespace lockstep::parallel::fsdp
