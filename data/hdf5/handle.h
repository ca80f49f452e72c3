#pragma once

#include <hdf5.h>

#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace lockstep::data::hdf5 {

// Held around all calls of HDF5: many builds of it serve one thread only, and the others lock
// themselves. While it is held, HDF5 prints no errors, and Hdf5Reason knows the last one.
class Hdf5Lock {
 public:
  Hdf5Lock();
  ~Hdf5Lock();
  Hdf5Lock(const Hdf5Lock&) = delete;
  Hdf5Lock& operator=(const Hdf5Lock&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// An id of HDF5 and how it is closed.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);

  Handle() = default;
  Handle(hid_t id, Close close) : id_(id), close_(close) {}
  ~Handle() { Reset(); }
  Handle(Handle&& other) noexcept
      : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      Reset();
      id_ = std::exchange(other.id_, H5I_INVALID_HID);
      close_ = other.close_;
    }
    return *this;
  }

  // Whether there is one: false where HDF5 failed to make it.
  bool ok() const { return id_ >= 0; }
  hid_t get() const { return id_; }

 private:
  void Reset();

  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

// Why HDF5's last call in this thread failed, in its words: the innermost of its reasons. Empty
// where it does not say.
std::string Hdf5Reason();

// `message`, and after it HDF5's reason.
absl::Status Hdf5Error(absl::StatusCode code, const std::string& message);

}  // namespace lockstep::data::hdf5
