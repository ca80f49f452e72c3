#include "lockstep/comm/nccl/testing/fake_library.h"
#include "lockstep/comm/nccl/testing/fake_state.h"

namespace lockstep::comm::nccl::testing {

FakeFabric::FakeFabric(int size, std::function<at::Device(int rank)> device_of)
    : impl_(std::make_shared<FakeState>()) {
  impl_->device_of = std::move(device_of);
  for (int rank = 0; rank < size; ++rank) impl_->devices.push_back(rank);
}

FakeFabric::~FakeFabric() {
  std::vector<std::thread> threads;
  {
    Lock lock(impl_->mutex);
    for (auto& [handle, stream] : impl_->streams) stream->destroyed = true;
    threads.swap(impl_->threads);
    impl_->changed.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Library> FakeFabric::library(int rank) { return MakeFakeLibrary(impl_, rank); }

void FakeFabric::Inject(const Fault& fault) {
  Lock lock(impl_->mutex);
  impl_->faults.push_back(fault);
}

void FakeFabric::ShareDevice(int rank, int with) {
  Lock lock(impl_->mutex);
  impl_->devices[rank] = impl_->devices[with];
}

LiveCounts FakeFabric::live() const {
  Lock lock(impl_->mutex);
  return {.streams = static_cast<int>(impl_->streams.size()),
          .events = static_cast<int>(impl_->events.size()),
          .communicators = static_cast<int>(impl_->comms.size())};
}

int FakeFabric::misuses() const {
  Lock lock(impl_->mutex);
  return impl_->misuses;
}

int FakeFabric::calls(int rank, Where where) const {
  Lock lock(impl_->mutex);
  const auto found = impl_->calls.find({rank, where});
  return found == impl_->calls.end() ? 0 : found->second;
}

QueuedStream::QueuedStream(FakeFabric& fabric, int rank)
    : library_(fabric.library(rank)),
      impl_(fabric.impl_),
      stream_(*library_->CreateStream()),
      previous_(CurrentStreamOfThread()) {
  CurrentStreamOfThread() = stream_;
}

QueuedStream::~QueuedStream() {
  Synchronize();
  CurrentStreamOfThread() = previous_;
  library_->DestroyStream(stream_);
}

void QueuedStream::Run(std::function<void()> kernel) {
  Lock lock(impl_->mutex);
  impl_->Push(lock, stream_, [kernel = std::move(kernel)](Lock&) { kernel(); });
}

void QueuedStream::Synchronize() {
  Lock lock(impl_->mutex);
  bool reached = false;
  impl_->Push(lock, stream_, [&](Lock&) { reached = true; });
  impl_->changed.wait(lock, [&] { return reached; });
}

}  // namespace lockstep::comm::nccl::testing
