// create.h, built with --config=gpu.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/comm/nccl/cuda_library.h"
#include "lockstep/comm/nccl/device_choice.h"
#include "lockstep/comm/nccl/meet.h"
#include "lockstep/comm/nccl/nccl_communicator.h"

namespace lockstep::comm::nccl {
namespace {

absl::StatusOr<std::shared_ptr<Library>> LibraryFor(const launch::World& world) {
  const absl::StatusOr<int> visible = CountCudaDevices();
  if (!visible.ok()) return visible.status();
  const absl::StatusOr<int> index = ChooseDevice(world, *visible);
  if (!index.ok()) return index.status();
  // Before anything touches a device: each that is touched gets a context, of some 0.5 GB.
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .setDevice({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(*index)});
  return CudaLibrary(*index);
}

}  // namespace

int CountDevices() { return CountCudaDevices().value_or(0); }

absl::Status CheckDevices() {
  const absl::StatusOr<int> visible = CountCudaDevices();
  if (!visible.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no GPU can be used: ", std::string{visible.status().message()}));
  }
  return ChooseDevice({}, *visible).status();
}

absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World& world,
                                                     const Options& options) {
  absl::StatusOr<std::shared_ptr<Library>> library = LibraryFor(world);
  if (!library.ok()) return library.status();
  absl::StatusOr<std::shared_ptr<Store>> store = Meet(world, options.deadline);
  if (!store.ok()) return store.status();
  return CreateOn(*std::move(library), **store, world.rank, world.size, options);
}

absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World& world,
                                                     Communicator& other, const Options& options) {
  absl::StatusOr<std::shared_ptr<Library>> library = LibraryFor(world);
  if (!library.ok()) return library.status();
  return CreateOn(*std::move(library), other, options);
}

}  // namespace lockstep::comm::nccl
