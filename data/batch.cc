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

const Batch::Field& Batch::Find(std::string_view name) const {
  const auto field = std::find_if(fields_.begin(), fields_.end(),
                                  [name](const Field& f) { return f.name == name; });
  TORCH_CHECK_INDEX(field != fields_.end(), "the batch has no field '", std::string{name},
                    "': it has ", fields_.empty() ? "none" : absl::StrJoin(names(), ", "));
  return *field;
}

const at::Tensor& Batch::operator[](std::string_view name) const { return Find(name).tensor; }

at::Tensor Batch::To(std::string_view name, at::Device device) const {
  const Field& field = Find(name);
  if (field.tensor.device() == device) return field.tensor;
  at::Tensor copy = field.tensor.to(device, field.tensor.scalar_type(), /*non_blocking=*/true);
  field.copied.Record(device);
  return copy;
}

int64_t Batch::rows() const { return fields_.empty() ? 0 : fields_[0].tensor.size(0); }

std::vector<std::string> Batch::names() const {
  std::vector<std::string> names;
  for (const Field& field : fields_) names.push_back(field.name);
  return names;
}

const at::Tensor& Batch::Reserve(std::string_view name, at::IntArrayRef sizes,
                                 at::ScalarType dtype) {
  auto field = std::find_if(fields_.begin(), fields_.end(),
                            [name](const Field& f) { return f.name == name; });
  if (field == fields_.end()) {
    field = fields_.emplace(fields_.end());
    field->name = name;
  }
  field->copied.Wait();
  at::Tensor& tensor = field->tensor;
  if (!tensor.defined() || tensor.scalar_type() != dtype || HeldElsewhere(tensor)) {
    tensor = at::empty(sizes, at::TensorOptions(dtype).pinned_memory(pinned_));
  } else if (tensor.sizes() != sizes) {
    tensor.resize_(sizes);
  }
  return tensor;
}

}  // namespace lockstep::data
