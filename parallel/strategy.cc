#include "lockstep/parallel/strategy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "lockstep/parallel/device_groups.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {

Strategy::Strategy(std::shared_ptr<torch::nn::Module> model, const comm::Communicator* comm)
    : model_(std::move(model)),
      rank_(comm == nullptr ? 0 : comm->rank()),
      size_(comm == nullptr ? 1 : comm->size()) {
  if (model_ == nullptr) {
    throw StatusError(absl::InvalidArgumentError("a strategy needs a model, and this one is null"));
  }
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

const StepStatistics& Strategy::last_step() const {
  if (read_last_step_) last_step_ = read_last_step_();
  read_last_step_ = nullptr;
  return last_step_;
}

std::vector<at::Tensor> Strategy::Gradients() const {
  std::vector<at::Tensor> gradients;
  for (const NamedTensor& parameter : parameters_) {
    const at::Tensor& gradient = parameter.tensor.grad();
    if (gradient.defined()) gradients.push_back(gradient);
  }
  return gradients;
}

at::Tensor Strategy::ClipGradNorm(double max_norm) {
  at::NoGradGuard no_grad;
  const auto groups = GroupByDeviceAndDtype(Gradients());
  const at::Device device = parameters_.empty() ? at::kCPU : parameters_[0].tensor.device();
  at::Tensor squares = at::zeros({}, at::TensorOptions(at::kDouble).device(device));
  for (const std::vector<at::Tensor>& group : groups) {
    const bool is_double = group[0].scalar_type() == at::kDouble;
    const auto norms = at::_foreach_norm(group, 2, is_double ? at::kDouble : at::kFloat);
    squares += at::stack(norms).to(device, at::kDouble).square().sum();
  }
  const at::Tensor norm = SumOverShards(squares).sqrt();
  const at::Tensor scale = max_norm / (norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
  if (device.is_cpu()) {
    if (scale.item<double>() >= 1) return norm;
    for (const auto& group : groups) at::_foreach_mul_(group, scale.item());
    return norm;
  }
  // Whether there is anything to scale only the device knows.
  const at::Tensor limited = scale.clamp_max(1);
  for (const auto& group : groups) {
    at::_foreach_mul_(group, limited.to(group[0].device(), group[0].scalar_type()));
  }
  return norm;
}

void Strategy::ClipGradValue(double max_value) {
  at::NoGradGuard no_grad;
  for (at::Tensor gradient : Gradients()) gradient.clamp_(-max_value, max_value);
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

void Strategy::UpdateFull(const std::vector<NamedTensor>& tensors, const StateUpdater& update) {
  at::NoGradGuard no_grad;
  for (const NamedTensor& each : tensors) {
    if (each.tensor.defined()) update(each.name, each.tensor.detach());
  }
}

std::vector<StateShard> Strategy::StateShards() {
  std::vector<StateShard> shards;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const at::Tensor local = tensor.detach();
    shards.push_back({.name = name,
                      .sizes = tensor.sizes().vec(),
                      .local = local.is_contiguous() ? local.view(-1) : local,
                      .replica = rank_,
                      .replicas = size_,
                      .trainable = tensor.requires_grad()});
  };
  std::unordered_set<const void*> seen;
  for (const auto& parameter : model_->named_parameters()) {
    if (seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
      add(parameter.key(), parameter.value());
    }
  }
  for (const auto& buffer : model_->named_buffers()) add(buffer.key(), buffer.value());
  return shards;
}

std::unique_ptr<comm::Communicator> SplitPrivate(comm::Communicator& comm) {
  return ValueOrThrow(comm.Split(/*color=*/0, /*key=*/comm.rank()));
}

namespace {

// Calls f(kind, name, tensor) with each parameter and buffer.
template <typename Function>
void ForEachTensor(torch::nn::Module& model, const std::vector<std::string>& ignored, Function f) {
  const std::unordered_set<std::string> skip(ignored.begin(), ignored.end());
  std::unordered_set<const void*> seen;  // those with several names have the first
  const auto all = [&](const char* kind, const auto& named) {
    for (const auto& each : named) {
      if (!seen.insert(each.value().unsafeGetTensorImpl()).second) continue;
      if (!skip.contains(each.key())) f(kind, each.key(), each.value());
    }
  };
  all("parameter", model.named_parameters());
  all("buffer", model.named_buffers());
}

// A line for each option, parameter and buffer.
std::vector<std::string> Describe(torch::nn::Module& model, const ModelCheck& check) {
  std::vector<std::string> lines;
  for (const std::string& option : check.options) lines.push_back("option " + option);
  ForEachTensor(
      model, check.ignored,
      [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
        lines.push_back(absl::StrCat(
            kind, " ", name, ": ", c10::toString(tensor.scalar_type()), " [",
            absl::StrJoin(tensor.sizes(), ", "), "]",
            tensor.is_contiguous()
                ? ""
                : absl::StrCat(" of strides [", absl::StrJoin(tensor.strides(), ", "), "]"),
            tensor.requires_grad() ? ", trainable" : ""));
      });
  return lines;
}

// FNV-1a: the same on all ranks, which std::hash does not promise.
int64_t Fingerprint(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return static_cast<int64_t>(hash);
}

}  // namespace

void CheckSameModel(torch::nn::Module& model, comm::Communicator& comm, const ModelCheck& check) {
  const std::string mine = absl::StrJoin(Describe(model, check), "\n");
  at::Tensor gathered =
      at::empty({comm.size()}, at::TensorOptions(at::kLong).device(comm.device()));
  at::Tensor own = gathered.narrow(0, comm.rank(), 1).fill_(Fingerprint(mine));
  ThrowIfError(comm.AllGatherInto(gathered, own).Wait());
  const at::Tensor fingerprints = gathered.cpu();
  const int64_t* all = fingerprints.const_data_ptr<int64_t>();
  const auto* other = std::find_if(all, all + comm.size(), [&](int64_t f) { return f != all[0]; });
  if (other == all + comm.size()) return;
  const auto key = [&](int64_t rank) { return absl::StrCat("model/", comm.name(), "/", rank); };
  const auto lines_of = [&](int64_t rank) -> std::vector<std::string> {
    return absl::StrSplit(ValueOrThrow(comm.store().Get(key(rank), absl::Minutes(1))), '\n');
  };
  ThrowIfError(comm.store().Set(key(comm.rank()), mine));
  const std::vector<std::string> first = lines_of(0);
  const std::vector<std::string> second = lines_of(other - all);
  const size_t line =
      std::mismatch(first.begin(), first.end(), second.begin(), second.end()).first - first.begin();
  const auto at_line = [line](const std::vector<std::string>& lines) {
    return line < lines.size() ? lines[line] : std::string("nothing more");
  };
  throw StatusError(absl::FailedPreconditionError(
      absl::StrCat("the ranks' models differ: rank 0 has ", at_line(first), "; rank ", other - all,
                   " has ", at_line(second))));
}

void BroadcastModel(torch::nn::Module& model, comm::Communicator& comm,
                    const std::vector<std::string>& ignored, int root) {
  at::NoGradGuard no_grad;
  ForEachTensor(model, ignored, [](const char*, const std::string&, const at::Tensor& tensor) {
    tensor.storage().data();  // throws, before ranks wait, where another strategy has sharded it
  });
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (the model's, a contiguous one)
  std::vector<comm::Work> works;
  ForEachTensor(model, ignored, [&](const char*, const std::string&, const at::Tensor& tensor) {
    at::Tensor copy = tensor.detach().contiguous();
    copies.emplace_back(tensor.detach(), copy);
    // As bytes: buffers may have dtypes that communicators do not know.
    works.push_back(comm.Broadcast(copy.view(-1).view(at::kByte), root));
  });
  for (const comm::Work& work : works) ThrowIfError(work.Wait());
  for (auto& [tensor, copy] : copies) {
    if (!tensor.is_alias_of(copy)) tensor.copy_(copy);
  }
}

}  // namespace lockstep::parallel
