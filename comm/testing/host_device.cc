#include "lockstep/comm/testing/host_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace lockstep::comm::testing {
namespace {

constexpr at::DeviceType kType = at::kHPU;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::HPU);

thread_local at::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kHostDevices> current_streams = {};
thread_local const QueuedEvents::Queue* events_of_thread = nullptr;
std::atomic<int> events_on_other_devices = 0;
std::atomic<int> events_waited_for = 0;

void CountIfOther(at::DeviceIndex index) {
  if (index != current) ++events_on_other_devices;
}

class HostEvent {
 public:
  // Asks for it; Reach(the number that it returns) says that the device has come there.
  int Record() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++recorded_;
  }

  void Reach(int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    reached_ = number;
    time_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }

  bool reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_ == recorded_;
  }

  std::chrono::steady_clock::time_point Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_ == recorded_; });
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int recorded_ = 0;
  int reached_ = 0;
  std::chrono::steady_clock::time_point time_;
};

// Whoever destroys one may do so before it is reached.
using EventPtr = std::shared_ptr<HostEvent>;
EventPtr& EventOf(void* event) { return *static_cast<EventPtr*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  at::DeviceType type() const override { return kType; }
  at::Device exchangeDevice(at::Device device) const override {
    const at::Device before = getDevice();
    current = device.index();
    return before;
  }
  at::Device getDevice() const override { return {kType, current}; }
  void setDevice(at::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(at::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(at::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  at::DeviceIndex deviceCount() const noexcept override { return kHostDevices; }

  void record(void** event, const c10::Stream& stream, const at::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    CountIfOther(stream.device_index());
    if (*event == nullptr) *event = new EventPtr(std::make_shared<HostEvent>());
    auto reach = [event = EventOf(*event), number = EventOf(*event)->Record()] {
      event->Reach(number);
    };
    if (events_of_thread == nullptr) {
      reach();
    } else {
      (*events_of_thread)(std::move(reach));
    }
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* event) const override { return EventOf(event)->reached(); }
  void synchronizeEvent(void* event) const override {
    ++events_waited_for;
    EventOf(event)->Await();
  }
  double elapsedTime(void* begin, void* end, const at::DeviceIndex index) const override {
    CountIfOther(index);
    return std::chrono::duration<double, std::milli>(EventOf(end)->Await() -
                                                     EventOf(begin)->Await())
        .count();
  }
  void destroyEvent(void* event, const at::DeviceIndex index) const noexcept override {
    CountIfOther(index);
    delete static_cast<EventPtr*>(event);
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override { ++events_waited_for; }
  void synchronizeDevice(const at::DeviceIndex /*index*/) const override { ++events_waited_for; }
};

C10_REGISTER_GUARD_IMPL(HPU, Guard);

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return {data, data, &std::free, {kType, current}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

class Hooks final : public at::HPUHooksInterface {
 public:
  void init() const override {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex /*index*/) const override { return true; }
  const at::Generator& getDefaultGenerator(at::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::DeviceIndex deviceCount() const override { return kHostDevices; }
  at::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(at::DeviceIndex index) const override { current = index; }
  at::DeviceIndex exchangeDevice(at::DeviceIndex index) const override {
    return std::exchange(current, index);
  }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex index) const override {
    return std::exchange(current, index);
  }
};

Memory memory;

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kType, &memory);
  at::HPUHooksRegistry()->Register("HPUHooks",
                                   [](at::HPUHooksArgs) -> std::unique_ptr<at::HPUHooksInterface> {
                                     return std::make_unique<Hooks>();
                                   });
  return true;
}();

at::Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current)));
  return at::detail::empty_generic(sizes, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor EmptyStrided(at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                        std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current)));
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor OnCpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  // data_ptr() also of what is only read: it throws where a storage must not be used.
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  OnCpu(to).copy_(OnCpu(from));
  return to;
}

at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(to.sizes() == from.sizes(), "a test's device does not resize");
  return CopyFrom(from, to, false);
}

at::Tensor& SetStorage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                       at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

void OnTheCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", Empty);
  m.impl("empty_strided", EmptyStrided);
  m.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", SetStorage);
  m.impl("_copy_from", CopyFrom);
  m.impl("_copy_from_and_resize", CopyFromAndResize);
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&OnTheCpu>());
}

}  // namespace

at::Device HostDevice(int index) { return {kType, static_cast<at::DeviceIndex>(index)}; }

int EventsOnOtherDevices() { return events_on_other_devices; }

int EventsWaitedFor() { return events_waited_for; }

QueuedEvents::QueuedEvents(Queue queue)
    : queue_(std::move(queue)), previous_(std::exchange(events_of_thread, &queue_)) {}

QueuedEvents::~QueuedEvents() { events_of_thread = previous_; }

}  // namespace lockstep::comm::testing
