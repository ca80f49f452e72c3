#include "lockstep/comm/decorator.h"

#include <utility>

namespace lockstep::comm {

Decorator::Decorator(std::unique_ptr<Communicator> inner)
    : Communicator(inner->rank(), inner->size(), inner->device(), inner->name(),
                   inner->flight_recorder()),
      inner_(std::move(inner)) {}

at::Tensor Decorator::Empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return inner_->Empty(sizes, dtype);
}

absl::StatusOr<std::unique_ptr<Communicator>> Decorator::Split(std::optional<int> color, int key) {
  return inner_->Split(color, key);
}

void Decorator::StartAfter(const Work& work) { inner_->StartAfter(work); }

void Decorator::Abort(absl::Status reason) { inner_->Abort(std::move(reason)); }

Store& Decorator::store() { return inner_->store(); }

Work Decorator::Issue(Operation operation) { return inner_->Issue(std::move(operation)); }

}  // namespace lockstep::comm
