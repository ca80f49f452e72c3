#include "lockstep/parallel/strategy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <cmath>
#include <unordered_set>
#include <utility>

#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {

Strategy::Strategy(std::shared_ptr<torch::nn::Module> model) : model_(std::move(model)) {
  std::unordered_set<const void*> seen;
  for (const auto& parameter : model_->named_parameters()) {
    if (parameter.value().requires_grad() &&
        seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
      parameters_.push_back({parameter.key(), parameter.value()});
    }
  }
}

std::vector<at::Tensor> Strategy::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters_) tensors.push_back(parameter.tensor);
  return tensors;
}

double Strategy::SumOfSquares() const {
  double sum = 0;
  for (const NamedTensor& parameter : parameters_) {
    const at::Tensor& gradient = parameter.tensor.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const double norm = at::linalg_vector_norm(gradient, 2).item<double>();
    sum += norm * norm;
  }
  return sum;
}

void Strategy::ScaleGradients(double norm, double max_norm) {
  const double scale = max_norm / (norm + 1e-6);
  if (scale >= 1) return;
  at::NoGradGuard no_grad;
  for (const NamedTensor& parameter : parameters_) {
    if (parameter.tensor.grad().defined()) parameter.tensor.grad().mul_(scale);
  }
}

double Strategy::ClipGradNorm(double max_norm) {
  const double norm = std::sqrt(SumOfSquares());
  ScaleGradients(norm, max_norm);
  return norm;
}

void Strategy::VisitState(const StateVisitor& visit) {
  UpdateState([&](const std::string& name, const at::Tensor& full) { visit(name, full); });
}

void Strategy::UpdateState(const StateUpdater& update) {
  at::NoGradGuard no_grad;
  std::unordered_set<const void*> seen;
  for (const auto& parameter : model_->named_parameters()) {
    if (seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
      update(parameter.key(), parameter.value().detach());
    }
  }
  for (const auto& buffer : model_->named_buffers()) update(buffer.key(), buffer.value());
}

std::unique_ptr<comm::Communicator> SplitPrivate(comm::Communicator& comm) {
  return ValueOrThrow(comm.Split(/*color=*/0, /*key=*/comm.rank()));
}

void BroadcastModel(torch::nn::Module& model, comm::Communicator& comm) {
  at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (the model's, a contiguous one)
  std::vector<comm::Work> works;
  const auto broadcast = [&](const at::Tensor& tensor) {
    at::Tensor copy = tensor.detach().contiguous();
    copies.emplace_back(tensor.detach(), copy);
    if (copy.scalar_type() == at::kBool) copy = copy.view(at::kByte);
    works.push_back(comm.Broadcast(copy, /*root=*/0));
  };
  for (const at::Tensor& parameter : model.parameters()) broadcast(parameter);
  for (const at::Tensor& buffer : model.buffers()) broadcast(buffer);
  for (const comm::Work& work : works) ThrowIfError(work.Wait());
  for (auto& [tensor, copy] : copies) {
    if (!tensor.is_alias_of(copy)) tensor.copy_(copy);
  }
}

}  // namespace lockstep::parallel
