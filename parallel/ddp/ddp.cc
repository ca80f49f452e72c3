#include "lockstep/parallel/ddp/ddp.h"

#include <unordered_set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/reducer.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

std::vector<std::string> Describe(const DdpOptions& options) {
  return {absl::StrCat("first_bucket_bytes=", options.first_bucket_bytes),
          absl::StrCat("bucket_bytes=", options.bucket_bytes),
          absl::StrCat("broadcast_buffers=", options.broadcast_buffers),
          absl::StrCat("find_unused_parameters=", options.find_unused_parameters),
          absl::StrCat("static_graph=", options.static_graph),
          absl::StrCat("comm_hook=", options.comm_hook ? options.comm_hook->name() : "none")};
}

// All names of the tensors that have one in `ignored`.
std::vector<std::string> ExpandIgnored(const torch::nn::Module& model,
                                       const std::vector<std::string>& ignored) {
  const auto parameters = model.named_parameters();
  const auto buffers = model.named_buffers();
  std::unordered_set<const void*> tensors;
  for (const std::string& name : ignored) {
    const at::Tensor* tensor = parameters.find(name);
    if (tensor == nullptr) tensor = buffers.find(name);
    if (tensor == nullptr) {
      throw StatusError(absl::InvalidArgumentError(absl::StrCat(
          "DdpOptions::ignored: the model has no parameter or buffer \"", name, "\"")));
    }
    tensors.insert(tensor->unsafeGetTensorImpl());
  }
  std::vector<std::string> names;
  for (const auto* all : {&parameters, &buffers}) {
    for (const auto& each : *all) {
      if (tensors.count(each.value().unsafeGetTensorImpl()) > 0) names.push_back(each.key());
    }
  }
  return names;
}

// The model's parameters with requires_grad or without, a shared one once.
std::vector<NamedTensor> Parameters(const torch::nn::Module& model,
                                    const std::vector<std::string>& ignored, bool requires_grad) {
  std::unordered_set<const void*> seen;
  std::vector<NamedTensor> parameters;
  for (const auto& each : model.named_parameters()) {
    if (each.value().requires_grad() == requires_grad &&
        !absl::c_linear_search(ignored, each.key()) &&
        seen.insert(each.value().unsafeGetTensorImpl()).second) {
      parameters.push_back({each.key(), each.value()});
    }
  }
  return parameters;
}

std::vector<at::Tensor> Buffers(const torch::nn::Module& model,
                                const std::vector<std::string>& ignored) {
  std::vector<at::Tensor> buffers;
  for (const auto& each : model.named_buffers()) {
    if (!absl::c_linear_search(ignored, each.key())) buffers.push_back(each.value());
  }
  return buffers;
}

}  // namespace

Ddp::Ddp(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm, DdpOptions options)
    : Strategy(std::move(model), &comm), ignored_(ExpandIgnored(this->model(), options.ignored)) {
  std::vector<NamedTensor> trainable = Parameters(this->model(), ignored_, /*requires_grad=*/true);
  if (trainable.empty()) {
    throw StatusError(absl::InvalidArgumentError(
        "Ddp: the model has no trainable parameter, so there is nothing to average"));
  }
  auto own = SplitPrivate(comm);
  CheckSameModel(this->model(), *own, {.ignored = ignored_, .options = Describe(options)});
  BroadcastModel(this->model(), *own, ignored_);
  reducer_ = std::make_unique<ddp::Reducer>(
      std::move(trainable), Parameters(this->model(), ignored_, /*requires_grad=*/false),
      options.broadcast_buffers ? Buffers(this->model(), ignored_) : std::vector<at::Tensor>(),
      std::move(own), options, [this] { return sync(); },
      [this](StepReader read) { set_last_step(std::move(read)); });
}

Ddp::~Ddp() = default;

}  // namespace lockstep::parallel
