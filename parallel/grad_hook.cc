#include "lockstep/parallel/grad_hook.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {

GradHook::GradHook(const at::Tensor& parameter, std::function<void()> accumulated)
    : accumulator_(torch::autograd::impl::grad_accumulator(parameter)) {
  using torch::autograd::variable_list;
  key_ = accumulator_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [accumulated = std::move(accumulated)](const variable_list& outputs,
                                             const variable_list& gradients) {
        // Undefined where a custom function has none for this parameter.
        if (gradients.at(0).defined()) accumulated();
        return outputs;
      }));
}

GradHook::~GradHook() {
  if (accumulator_ != nullptr) accumulator_->del_post_hook(key_);
}

absl::Status GradientTwiceError(const std::string& parameter) {
  return absl::FailedPreconditionError(
      absl::StrCat("parameter ", parameter,
                   " got its gradient twice in one backward: part of the graph runs backward again "
                   "inside it, where torch::autograd::grad() would do"));
}

absl::Status AbandonedBackwardError() {
  return absl::AbortedError(
      "backward ended with an exception, so the gradients of this rank are incomplete: start again "
      "from the last good state with a new strategy");
}

namespace {

// The engine destroys the callback with the backward that it belongs to, called or not.
class EndOfBackward {
 public:
  EndOfBackward(std::function<void()> finish, std::function<void()> abandoned)
      : finish_(std::move(finish)), abandoned_(std::move(abandoned)) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  ~EndOfBackward() {
    if (!reached_) abandoned_();
  }

  void Reach() {
    // The node of the outer backward that runs this one.
    if (torch::autograd::get_current_node() != nullptr) {
      throw StatusError(absl::FailedPreconditionError(
          "backward() was called inside backward(), where it ends before the other gradients have "
          "arrived: recompute with torch::autograd::grad() and the parameters among its inputs"));
    }
    reached_ = true;
    finish_();
  }

 private:
  const std::function<void()> finish_;
  const std::function<void()> abandoned_;
  bool reached_ = false;
};

}  // namespace

void AtEndOfBackward(std::function<void()> finish, std::function<void()> abandoned) {
  auto end = std::make_shared<EndOfBackward>(std::move(finish), std::move(abandoned));
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->Reach(); });
}

}  // namespace lockstep::parallel
