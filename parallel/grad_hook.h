#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "lockstep/parallel/node_ptr.h"

namespace lockstep::parallel {

// Calls a function each time backward has accumulated into a parameter's .grad, on the thread that
// did: the caller's for CPU tensors. Removed when destroyed.
//
//   GradHook hook(parameter, [&] { Reduce(parameter.grad()); });
//
// Autograd keeps the accumulator of a leaf only weakly, so a hook on it that nobody holds never
// fires and nothing says so; this holds it. It remembers the shape and dtype that the parameter has
// now, and set_data() with another dtype discards it: make hooks when the parameter is in its final
// form. autograd::grad() does not accumulate, and a nested backward() fires the hook again.
class GradHook {
 public:
  GradHook(const at::Tensor& parameter, std::function<void()> accumulated);
  ~GradHook();
  GradHook(GradHook&& other) noexcept = default;
  GradHook& operator=(GradHook&& other) = delete;

 private:
  NodePtr accumulator_;
  uintptr_t key_ = 0;
};

// The error of a hook that fires twice in one backward for the parameter of that name.
absl::Status GradientTwiceError(const std::string& parameter);

// The error of a strategy whose backward ended with an exception.
absl::Status AbandonedBackwardError();

// Runs `finish` once at the end of the backward that is running, before backward() returns; what it
// throws, backward() throws. Runs `abandoned` instead when that backward ends with an exception:
// the hooks that were still to fire then never do. `abandoned` must not throw. Legal only inside
// backward.
void AtEndOfBackward(std::function<void()> finish, std::function<void()> abandoned);

}  // namespace lockstep::parallel
