#include "lockstep/parallel/grad_hook.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace lockstep::parallel {

GradHook::GradHook(const at::Tensor& parameter, std::function<void()> accumulated)
    : accumulator_(torch::autograd::impl::grad_accumulator(parameter)) {
  using torch::autograd::variable_list;
  key_ = accumulator_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [accumulated = std::move(accumulated)](const variable_list& outputs, const variable_list&) {
        accumulated();
        return outputs;
      }));
}

GradHook::~GradHook() {
  if (accumulator_ != nullptr) accumulator_->del_post_hook(key_);
}

absl::Status GradientTwiceError(const std::string& parameter) {
  return absl::FailedPreconditionError(
      absl::StrCat("parameter ", parameter,
                   " got its gradient twice in one backward: either part of the graph runs "
                   "backward again inside "
                   "it, or an earlier backward ended with an exception"));
}

void AtEndOfBackward(std::function<void()> finish) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(finish));
}

}  // namespace lockstep::parallel
