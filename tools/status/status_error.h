#pragma once

#include <exception>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep {

// The one exception of this project: carries an absl::Status out of a place that cannot return
// one, such as a backward hook, a range-for over a data::Loader, or main.
//
//   void Train() {
//     auto dataset = lockstep::ValueOrThrow(lockstep::data::mnist::Open({}));
//     lockstep::ThrowIfError(work.Wait());
//   }
//
//   try {
//     Train();
//   } catch (const lockstep::StatusError& error) {
//     std::cerr << error.what() << "\n";  // code and message, for example "NOT_FOUND: ..."
//   }
class StatusError : public std::exception {
 public:
  // `status` is an error. An OK status becomes an INTERNAL error that says so.
  explicit StatusError(absl::Status status)
      : status_(status.ok() ? absl::InternalError("StatusError made from an OK status")
                            : std::move(status)),
        what_(status_.ToString()) {}

  const absl::Status& status() const { return status_; }
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  absl::Status status_;
  std::string what_;
};

// Throws StatusError unless `status` is OK.
inline void ThrowIfError(absl::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

// The value of `result`, or StatusError with its status.
template <typename T>
T ValueOrThrow(absl::StatusOr<T> result) {
  if (!result.ok()) throw StatusError(result.status());
  return *std::move(result);
}

}  // namespace lockstep
