#pragma once

#include <memory>
#include <optional>

#include "lockstep/comm/communicator.h"

namespace lockstep::comm {

// A communicator that hands everything on to another, for those that look at operations on their
// way (see CountingCommunicator). Split goes past the decorator: override it to decorate the parts.
class Decorator : public Communicator {
 public:
  at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(std::optional<int> color, int key) override;
  void StartAfter(const Work& work) override;
  void Abort(absl::Status reason) override;
  Store& store() override;
  Work Issue(Operation operation) override;

 protected:
  explicit Decorator(std::unique_ptr<Communicator> inner);

 private:
  const std::unique_ptr<Communicator> inner_;
};

}  // namespace lockstep::comm
