#include "lockstep/data/batch.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "absl/strings/str_join.h"

namespace lockstep::data {
namespace {

bool HeldElsewhere(const at::Tensor& tensor) {
  return tensor.use_count() > 1 || tensor.storage().use_count() > 1;
}

}  // namespace

const at::Tensor& Batch::operator[](std::string_view name) const {
  const auto field = std::find_if(fields_.begin(), fields_.end(),
                                  [name](const auto& f) { return f.first == name; });
  TORCH_CHECK_INDEX(field != fields_.end(), "the batch has no field '", std::string{name},
                    "': it has ", fields_.empty() ? "none" : absl::StrJoin(names(), ", "));
  return field->second;
}

int64_t Batch::rows() const { return fields_.empty() ? 0 : fields_[0].second.size(0); }

std::vector<std::string> Batch::names() const {
  std::vector<std::string> names;
  for (const auto& [field, tensor] : fields_) names.push_back(field);
  return names;
}

const at::Tensor& Batch::Reserve(std::string_view name, at::IntArrayRef sizes,
                                 at::ScalarType dtype) {
  auto field = std::find_if(fields_.begin(), fields_.end(),
                            [name](const auto& f) { return f.first == name; });
  if (field == fields_.end()) field = fields_.emplace(fields_.end(), name, at::Tensor());
  at::Tensor& tensor = field->second;
  if (!tensor.defined() || tensor.scalar_type() != dtype || HeldElsewhere(tensor)) {
    tensor = at::empty(sizes, at::TensorOptions(dtype).pinned_memory(pinned_));
  } else if (tensor.sizes() != sizes) {
    tensor.resize_(sizes);
  }
  return tensor;
}

}  // namespace lockstep::data
