#include "lockstep/parallel/device_groups.h"

#include <map>
#include <string>
#include <utility>

namespace lockstep::parallel {

std::vector<std::vector<at::Tensor>> GroupByDeviceAndDtype(const std::vector<at::Tensor>& tensors) {
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> by_kind;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    by_kind[{tensor.device().str(), tensor.scalar_type()}].push_back(tensor);
  }
  std::vector<std::vector<at::Tensor>> groups;
  for (auto& [kind, group] : by_kind) groups.push_back(std::move(group));
  return groups;
}

}  // namespace lockstep::parallel
