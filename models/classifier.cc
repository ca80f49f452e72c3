#include "lockstep/models/classifier.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/models/convnet/convnet.h"
#include "lockstep/models/mlp/mlp.h"
#include "lockstep/models/vit/vit.h"

namespace lockstep::models {
namespace {

template <typename Holder>
Classifier Erase(Holder holder) {
  return {holder.ptr(), [holder](at::Tensor images) mutable { return holder(std::move(images)); }};
}

struct Entry {
  const char* name;
  Classifier (*make)();
};

constexpr Entry kModels[] = {
    {"mlp", [] { return Erase(Mlp()); }},
    {"convnet", [] { return Erase(ConvNet()); }},
    {"vit", [] { return Erase(Vit()); }},
    {"vit25m", [] { return Erase(Vit(VitOptions{.dim = 512, .depth = 8})); }},
};

}  // namespace

absl::StatusOr<Classifier> Create(const std::string& name) {
  for (const Entry& entry : kModels) {
    if (entry.name == name) return entry.make();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no model '", name, "': choose one of ", absl::StrJoin(Names(), ", ")));
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const Entry& entry : kModels) names.push_back(entry.name);
  return names;
}

}  // namespace lockstep::models
